//! Exchanges through host memory.

use burn_core::backend::{
    Backend, TensorMetadata,
    tensor::{FloatTensor, IntTensor},
};
use burn_core::tensor::{DType, TensorData};
use futures_lite::future::block_on;
use half::bf16;
use nvfp4_parallel::{Collective, Element, ParallelError};

use super::exchange::{Exchange, Step};

/// Exchanges floats; waits for the device and for the other ranks.
pub(super) fn exchange_floats<B: Backend>(
    x: FloatTensor<B>,
    exchange: &Exchange,
) -> FloatTensor<B> {
    if exchange.is_local() {
        return x;
    }
    let device = x.device();
    let data = block_on(B::float_into_data(x)).unwrap_or_else(|error| panic!("{error}"));
    B::float_from_data(exchanged(data, exchange), &device)
}

/// Exchanges integers; waits for the device and for the other ranks.
pub(super) fn exchange_ints<B: Backend>(x: IntTensor<B>, exchange: &Exchange) -> IntTensor<B> {
    if exchange.is_local() {
        return x;
    }
    let device = x.device();
    let data = block_on(B::int_into_data(x)).unwrap_or_else(|error| panic!("{error}"));
    B::int_from_data(exchanged(data, exchange), &device)
}

fn exchanged(data: TensorData, exchange: &Exchange) -> TensorData {
    let made = match &exchange.forward {
        Step::AllReduce(_) | Step::ReduceScatter(_) => reduced(data, exchange),
        _ => moved(data, exchange),
    };
    made.unwrap_or_else(|error| panic!("{error}"))
}

/// Runs a reducing step in the dtype of the exchange.
fn reduced(data: TensorData, exchange: &Exchange) -> Result<TensorData, ParallelError> {
    let dtype = data.dtype();
    let travels_in = exchange.travels_in(dtype);
    if travels_in != dtype {
        let made = reduced_in_own(data.convert_dtype(travels_in), exchange)?;
        return Ok(made.convert_dtype(dtype));
    }
    reduced_in_own(data, exchange)
}

/// Runs a reducing step in the dtype of the elements.
fn reduced_in_own(data: TensorData, exchange: &Exchange) -> Result<TensorData, ParallelError> {
    match data.dtype() {
        DType::F32 => reduced_as::<f32>(data, exchange),
        DType::BF16 => reduced_as::<bf16>(data, exchange),
        DType::U32 => reduced_as::<u32>(data, exchange),
        // Exact in f32, from which the sum is rounded.
        DType::F16 => {
            let made = reduced_as::<f32>(data.convert::<f32>(), exchange)?;
            Ok(made.convert::<half::f16>())
        }
        dtype => panic!("x is {dtype:?}, but a reduction takes f32, bf16, f16 or u32"),
    }
}

fn reduced_as<T: Element + burn_core::tensor::Element>(
    data: TensorData,
    exchange: &Exchange,
) -> Result<TensorData, ParallelError> {
    let shape = exchange
        .forward
        .shape(data.shape().to_vec(), exchange.group.host.size());
    let group = &exchange.group.host;
    let mut values: Vec<T> = data.try_into_vec().expect("a tensor of this type");
    match &exchange.forward {
        Step::AllReduce(reduction) => group.all_reduce(T::buffer_mut(&mut values), *reduction)?,
        Step::ReduceScatter(reduction) => {
            let mut part = vec![T::default(); shape.iter().product()];
            let output = T::buffer_mut(&mut part);
            group.reduce_scatter(T::buffer(&values), output, *reduction)?;
            values = part;
        }
        step => unreachable!("{step:?} reduces nothing"),
    }
    Ok(TensorData::new(values, shape))
}

/// Runs a step that moves elements without interpreting them.
fn moved(data: TensorData, exchange: &Exchange) -> Result<TensorData, ParallelError> {
    let (rank, size) = (exchange.group.host.rank(), exchange.group.host.size());
    let shape = exchange.forward.shape(data.shape().to_vec(), size);
    let row: usize = data.shape()[1..].iter().product::<usize>() * data.dtype().size();
    let group = &exchange.group.host;
    let input = data.as_bytes();
    let output = match &exchange.forward {
        Step::AllGather => {
            let mut output = vec![0u8; input.len() * size];
            group.all_gather(u8::buffer(input), u8::buffer_mut(&mut output))?;
            output
        }
        Step::Slice => {
            let part = input.len() / size;
            input[rank * part..(rank + 1) * part].to_vec()
        }
        Step::AllToAll { send, receive } => {
            let bytes = |rows: &[usize]| rows.iter().map(|rows| rows * row).collect::<Vec<_>>();
            let (send, receive) = (bytes(send), bytes(receive));
            let mut output = vec![0u8; receive.iter().sum()];
            let to = u8::buffer_mut(&mut output);
            group.all_to_all(u8::buffer(input), &send, to, &receive)?;
            output
        }
        Step::Broadcast { root } => {
            let mut output = input.to_vec();
            group.broadcast(u8::buffer_mut(&mut output), *root)?;
            output
        }
        step => unreachable!("{step:?} moves nothing"),
    };
    Ok(TensorData::from_bytes_vec(output, shape, data.dtype()))
}
