//! Serializes the trained parameters of a model: those that require a gradient, by their IDs.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{Bytes, DType, Tensor, TensorData};
use burn_pack::{Reader, Writer};

/// Returns the trained parameters of `model` as a burnpack container, with this rank's shards of
/// sharded ones. The values are read at once, because the next step overwrites them in place.
///
/// # Errors
/// Returns an error if the container cannot be made.
pub(super) fn to_bytes<M: Module>(model: &M) -> Result<Bytes> {
    let mut found = Collect(Vec::new());
    model.visit(&mut found);
    let writer = Writer::new(found.0);
    writer.into_bytes().context("packing the parameters")
}

/// Loads the parameters from [`to_bytes`] into `model`.
///
/// # Errors
/// Returns an error if `bytes` is not such a container, or does not have exactly the trained
/// parameters.
pub(super) fn load<M: Module>(model: M, bytes: Bytes) -> Result<M> {
    let mut found = BTreeMap::new();
    for tensor in Reader::from_bytes(bytes)?.into_tensors()? {
        let (name, dtype, shape, id, bytes) = tensor.into_parts()?;
        let id = id.with_context(|| format!("{name} names no parameter"))?;
        found.insert(id, TensorData::from_bytes(bytes, shape, dtype));
    }
    let mut place = Place {
        found,
        problem: None,
    };
    let model = model.map(&mut place);
    if let Some(problem) = place.problem {
        anyhow::bail!("the parameters do not fit the model: {problem}");
    }
    ensure!(
        place.found.is_empty(),
        "the parameters do not fit the model: it does not train {} of them",
        place.found.len()
    );
    Ok(model)
}

struct Collect(Vec<burn_pack::Tensor>);

impl ModuleVisitor for Collect {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let value = param.base();
        if value.is_require_grad() {
            let id = param.id.val();
            let (bytes, shape, dtype) = value.into_data().into_parts();
            let name = format!("{id:016x}");
            self.0
                .push(burn_pack::Tensor::new(name, dtype, shape, Some(id), bytes));
        }
    }
}

struct Place {
    found: BTreeMap<u64, TensorData>,
    problem: Option<String>,
}

impl ModuleMapper for Place {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let value = param.val();
        if !value.is_require_grad() {
            return param;
        }
        let id = param.id;
        let (dims, dtype): ([usize; D], DType) = (value.dims(), value.dtype());
        match self.found.remove(&id.val()) {
            Some(data) if data.shape().as_slice() == dims && data.dtype() == dtype => {
                let tensor = Tensor::from_data(data, (&value.device(), dtype));
                Param::initialized(id, tensor.require_grad())
            }
            found => {
                let found = found.map(|data| format!("{:?} of {}", data.dtype(), data.shape()));
                self.problem.get_or_insert(format!(
                    "parameter {id} is {}, but must be {dtype:?} of {dims:?}",
                    found.as_deref().unwrap_or("absent")
                ));
                param
            }
        }
    }
}
