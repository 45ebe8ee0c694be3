//! Flex: tensors are in host memory already.

use burn_core::backend::{
    Flex,
    tensor::{FloatTensor, IntTensor},
};

use super::exchange::Exchange;
use super::{CollectiveOps, Fork, Link, host};

impl CollectiveOps for Flex {
    fn nvfp4_queue_exchange(x: FloatTensor<Self>, exchange: Exchange) -> FloatTensor<Self> {
        host::exchange_floats::<Self>(x, &exchange)
    }

    fn nvfp4_queue_exchange_int(x: IntTensor<Self>, exchange: Exchange) -> IntTensor<Self> {
        host::exchange_ints::<Self>(x, &exchange)
    }

    fn nvfp4_join(x: FloatTensor<Self>, _group: Link, _fork: Fork) -> FloatTensor<Self> {
        x
    }
}
