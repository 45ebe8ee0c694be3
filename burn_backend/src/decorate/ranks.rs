//! Decorated models on several ranks: adds exchanges to marks, and removes them.

use std::collections::HashMap;
use std::sync::Arc;

use burn_core::module::{Module, Param, ParamId, Reparameterizer};
use burn_core::tensor::Tensor;

use super::call::Layer;
use super::exchanged::Exchanged;
use super::mark::{Kind, Mark, marks};
use super::{Marker, undecorate};

/// Version of [`Module::apply_reparameterization`] for exchanges between ranks, for a `model` that
/// may be decorated.
pub(crate) fn reparameterize<M, R>(model: M, mut exchanges: R) -> M
where
    M: Module,
    R: Reparameterizer,
    R::Reparam: Into<Exchanged>,
{
    let marks = marks(&model);
    if marks.is_empty() {
        return model.apply_reparameterization(exchanges);
    }
    let model = undecorate(model).apply_reparameterization(Unmarked {
        marks: &marks,
        exchanges: &mut exchanges,
    });
    model.apply_reparameterization(Marked {
        marks,
        exchanges,
        weight: None,
    })
}

/// Version of [`Module::materialize`] for a `model` that may be decorated: gathers its parameters,
/// and keeps the marks.
pub(crate) fn gathered<M: Module>(model: M) -> M {
    let marks = marks(&model).into_iter().map(|(id, mark)| {
        let exchanged = None;
        (id, Mark { exchanged, ..mark })
    });
    let marks = marks.collect();
    undecorate(model).apply_reparameterization(Marker { marks })
}

/// Adds the exchanges of parameters without a mark.
struct Unmarked<'a, R> {
    marks: &'a HashMap<ParamId, Mark>,
    exchanges: &'a mut R,
}

impl<R: Reparameterizer> Reparameterizer for Unmarked<'_, R> {
    type Reparam = R::Reparam;

    fn reparameterize<const D: usize>(
        &mut self,
        path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<R::Reparam>) {
        match self.marks.contains_key(&param.id) {
            true => (param, None),
            false => self.exchanges.reparameterize(path, param),
        }
    }
}

/// Adds the marks, with the exchanges of their parameters.
///
/// A bias is exchanged only if the weight of its layer is. Autodiff visits operations by their
/// distance from the parameters: with an exchange of the bias alone, its mark would ask for the
/// gradient before the GEMM that computes it.
struct Marked<R> {
    marks: HashMap<ParamId, Mark>,
    exchanges: R,
    /// Layer of the last exchanged weight. Burn visits the bias of a layer after its weight.
    weight: Option<Arc<Layer>>,
}

impl<R> Reparameterizer for Marked<R>
where
    R: Reparameterizer,
    R::Reparam: Into<Exchanged>,
{
    type Reparam = Mark;

    fn reparameterize<const D: usize>(
        &mut self,
        path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<Mark>) {
        let Some(mark) = self.marks.get(&param.id).cloned() else {
            return (param, None);
        };
        let is_of_weight = |layer: &Arc<Layer>| Arc::ptr_eq(layer, &mark.layer);
        if mark.kind == Kind::Bias && !self.weight.as_ref().is_some_and(is_of_weight) {
            let exchanged = None;
            return (param, Some(Mark { exchanged, ..mark }));
        }
        let (param, exchanged) = self.exchanges.reparameterize(path, param);
        if exchanged.is_some() {
            self.weight = Some(mark.layer.clone());
        }
        let exchanged = exchanged.map(Into::into);
        (param, Some(Mark { exchanged, ..mark }))
    }
}
