//! Muon for matrices, and AdamW for all other parameters.
//!
//! The update of a matrix is its orthogonalized momentum: five Newton-Schulz iterations of Jordan
//! et al., <https://kellerjordan.github.io/posts/muon/>, bring all singular values of the momentum
//! near
//! 1. The scale factors are those of Jordan et al. and of Liu et al., "Muon is scalable for LLM
//!    training" (arXiv 2502.16982).

use std::collections::BTreeMap;

use burn_core::module::{Module, ModuleMapper, Param, ParamGroup, ParamId};
use burn_core::tensor::{DType, FloatDType, Tensor};
use burn_optim::GradientsParams;
use nvfp4_formats::Nvfp4Error;

use super::adamw::{AdamW, Check, ParameterMoments, Tracking, check_part};
use super::config::{AdamWConfig, in_range, learning_rate, not_negative, positive};

/// Term added to the norm of a matrix, which may be zero.
const EPSILON: f64 = 1e-7;

/// Scale factor of the orthogonalized update of a matrix, in addition to the learning rate.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum MuonScale {
    /// `sqrt(max(1, d_out / d_in))`, by Jordan et al.; for learning rates near 0.02.
    Original,
    /// `0.2 * sqrt(max(d_in, d_out))`, by Liu et al.: updates have the root mean square that AdamW
    /// updates usually have, so the learning rates and decays of AdamW fit.
    #[default]
    MatchAdamW,
}

impl MuonScale {
    /// Returns the factor for a weight `[d_in, d_out]`, in the layout of Burn's linear layers.
    pub fn factor(self, d_in: usize, d_out: usize) -> f64 {
        match self {
            Self::Original => (d_out as f64 / d_in as f64).max(1.0).sqrt(),
            Self::MatchAdamW => 0.2 * (d_in.max(d_out) as f64).sqrt(),
        }
    }
}

/// Newton-Schulz iteration that orthogonalizes a matrix.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NewtonSchulz {
    /// Coefficients `a`, `b` and `c` of `a X + b (X X^T) X + c (X X^T)^2 X`, which acts on each
    /// singular value.
    pub coefficients: [f64; 3],
    /// Number of iterations; at least one.
    pub steps: usize,
    /// Dtype of the matrices.
    pub precision: FloatDType,
}

impl Default for NewtonSchulz {
    /// Returns five iterations in `bf16` with the coefficients of Jordan et al.
    fn default() -> Self {
        Self {
            coefficients: [3.4445, -4.7750, 2.0315],
            steps: 5,
            precision: FloatDType::BF16,
        }
    }
}

impl NewtonSchulz {
    /// Orthogonalizes `x`, which has matrices in its last two axes: replaces their singular values
    /// by values near 1, with the defaults between 0.68 and 1.14 for those that were at least a
    /// hundredth of the norm. A zero matrix is unchanged.
    ///
    /// # Panics
    /// If `x` has only one axis.
    pub fn orthogonalize<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        assert!(D > 1, "a vector cannot be made orthogonal");
        let dtype = x.dtype();
        let dims = x.dims();
        // The Gram matrix is that of the shorter axis.
        let tall = dims[D - 2] > dims[D - 1];
        let x = if tall { x.swap_dims(D - 2, D - 1) } else { x };
        let x = x.cast(FloatDType::F32);
        let squares = x.clone() * x.clone();
        let norm = squares.sum_dim(D - 1).sum_dim(D - 2).sqrt();
        let mut x = (x / norm.add_scalar(EPSILON)).cast(self.precision);
        let [a, b, c] = self.coefficients;
        for _ in 0..self.steps {
            let gram = x.clone().matmul(x.clone().swap_dims(D - 2, D - 1));
            let square = gram.clone().matmul(gram.clone());
            let polynomial = gram.mul_scalar(b) + square.mul_scalar(c);
            x = x.clone().mul_scalar(a) + polynomial.matmul(x);
        }
        let x = if tall { x.swap_dims(D - 2, D - 1) } else { x };
        x.cast(dtype)
    }

    fn check(&self) -> Result<(), Nvfp4Error> {
        if self.steps == 0 {
            return Err(Nvfp4Error::value("steps", "0", "at least 1"));
        }
        for coefficient in self.coefficients {
            let valid = coefficient.is_finite();
            in_range("coefficients", coefficient, valid, "finite numbers")?;
        }
        match self.precision {
            FloatDType::F32 | FloatDType::BF16 | FloatDType::F16 => Ok(()),
            other => Err(Nvfp4Error::value(
                "precision",
                format!("{other:?}"),
                "F32, BF16 or F16",
            )),
        }
    }
}

/// Settings of [`Muon`].
#[derive(Debug, Clone)]
pub struct MuonConfig {
    /// Decay of the momentum, in `[0, 1)`.
    pub momentum: f64,
    /// True for Nesterov momentum: the update is `(1 - momentum) g + momentum m` instead of `m`.
    pub nesterov: bool,
    /// Orthogonalization.
    pub newton_schulz: NewtonSchulz,
    /// Scale factor of updates.
    pub scale: MuonScale,
    /// Factor on the learning rate of a step, for matrices; above 0.
    pub learning_rate: f64,
    /// Weight decay of matrices, multiplied by their learning rate; not negative.
    pub weight_decay: f64,
    /// Parameters with two or three axes that AdamW updates nevertheless, such as embeddings and
    /// heads. The default is those with `embed` or `head` in their path.
    pub except: ParamGroup,
    /// Settings of AdamW for all other parameters. Its gradient clipping covers only their
    /// gradients: the magnitude of a matrix's gradient has no effect in Muon.
    pub adamw: AdamWConfig,
}

impl Default for MuonConfig {
    fn default() -> Self {
        Self {
            momentum: 0.95,
            nesterov: true,
            newton_schulz: NewtonSchulz::default(),
            scale: MuonScale::default(),
            learning_rate: 1.0,
            weight_decay: 0.1,
            except: ParamGroup::from_any_predicates(vec!["embed", "head"]),
            adamw: AdamWConfig::default(),
        }
    }
}

impl MuonConfig {
    /// Creates an optimizer that has taken no step.
    ///
    /// # Errors
    /// Returns an error if a setting is out of range.
    pub fn try_init(self) -> Result<Muon, Nvfp4Error> {
        let momentum = self.momentum;
        in_range(
            "momentum",
            momentum,
            (0.0..1.0).contains(&momentum),
            "in [0, 1)",
        )?;
        self.newton_schulz.check()?;
        positive("learning_rate", self.learning_rate)?;
        not_negative("weight_decay", self.weight_decay)?;
        Ok(Muon {
            adamw: self.adamw.clone().try_init()?,
            config: self,
            time: 0,
            states: BTreeMap::new(),
        })
    }

    /// Panicking version of [`try_init`](Self::try_init).
    ///
    /// # Panics
    /// If [`try_init`](Self::try_init) returns an error.
    #[track_caller]
    pub fn init(self) -> Muon {
        crate::functions::or_panic("Muon", self.try_init())
    }

    /// Returns true if Muon updates a parameter: one with two axes, or a stack of matrices with
    /// three, that is not in `except`.
    pub fn takes(&self, id: ParamId, path: &str, axes: usize) -> bool {
        (axes == 2 || axes == 3) && !self.except.matches(&id, Some(path))
    }
}

/// Muon state of one parameter, flattened.
#[derive(Debug, Clone)]
pub struct MuonState {
    /// Running mean of the gradient, `f32`.
    pub momentum: Tensor<1>,
    /// `f32` master weight, if the parameter is not `f32` itself.
    pub weight: Option<Tensor<1>>,
}

/// Muon with its state, and AdamW for parameters that are not matrices. Each matrix of a stack
/// `[n, d_in, d_out]`, such as experts' weights, is orthogonalized separately.
///
/// The implementation uses Burn's tensor operations and matmul, and the kernels of [`AdamW`];
/// nothing is read back from the device.
#[derive(Debug, Clone)]
pub struct Muon {
    config: MuonConfig,
    time: u64,
    states: BTreeMap<u64, MuonState>,
    adamw: AdamW,
}

impl Muon {
    /// Returns the settings.
    pub fn config(&self) -> &MuonConfig {
        &self.config
    }

    /// Number of steps taken so far.
    pub fn time(&self) -> u64 {
        self.time
    }

    /// Returns the state of each matrix by its parameter's id, in ascending order.
    pub fn states(&self) -> &BTreeMap<u64, MuonState> {
        &self.states
    }

    /// Returns the optimizer of the other parameters.
    pub fn adamw(&self) -> &AdamW {
        &self.adamw
    }

    /// Restores this state, taken after `time` steps. `adamw_time` is the number of steps of
    /// [`adamw`](Self::adamw), and `moments` is its state.
    ///
    /// # Errors
    /// Returns an error if the tensors of a parameter differ in length, or their dtypes do not
    /// match the configuration.
    pub fn restore(
        &mut self,
        (time, adamw_time): (u64, u64),
        states: BTreeMap<u64, MuonState>,
        moments: BTreeMap<u64, ParameterMoments>,
    ) -> Result<(), Nvfp4Error> {
        for state in states.values() {
            let [elements] = state.momentum.dims();
            check_part("momentum", &state.momentum, elements, DType::F32)?;
            if let Some(weight) = &state.weight {
                check_part("weight", weight, elements, DType::F32)?;
            }
        }
        self.adamw.restore(adamw_time, moments)?;
        self.time = time;
        self.states = states;
        Ok(())
    }

    /// Updates all parameters that have a gradient, with learning rate `lr`. Other parameters are
    /// unchanged.
    ///
    /// # Errors
    /// Same as [`AdamW::try_step`], for parameters of both optimizers. No parameter has changed
    /// then, but `model` is dropped.
    pub fn try_step<M: Module>(
        &mut self,
        lr: f64,
        model: M,
        gradients: GradientsParams,
    ) -> Result<M, Nvfp4Error> {
        learning_rate(lr)?;
        let elements = |id: u64| {
            let of_muon = self.states.get(&id).map(|state| state.momentum.dims()[0]);
            of_muon.or_else(|| self.adamw.elements(id))
        };
        Check::new(&elements, &gradients).run(&model)?;
        let mut step = Step {
            optimizer: self,
            path: Vec::new(),
            lr,
            gradients,
            any: false,
        };
        let model = model.map(&mut step);
        let Step { gradients, any, .. } = step;
        let time = self.adamw.time();
        let model = self.adamw.try_step(lr, model, gradients)?;
        self.time += u64::from(any || self.adamw.time() > time);
        Ok(model)
    }

    /// Panicking version of [`try_step`](Self::try_step).
    ///
    /// # Panics
    /// If [`try_step`](Self::try_step) returns an error.
    #[track_caller]
    pub fn step<M: Module>(&mut self, lr: f64, model: M, gradients: GradientsParams) -> M {
        crate::functions::or_panic("Muon", self.try_step(lr, model, gradients))
    }

    /// Updates one parameter, without autodiff.
    fn update<const D: usize>(
        &mut self,
        lr: f64,
        id: ParamId,
        parameter: Tensor<D>,
        gradient: Tensor<D>,
    ) -> Tensor<D> {
        let config = &self.config;
        let dims = parameter.dims();
        let dtype = parameter.dtype();
        let gradient = gradient.cast(FloatDType::F32);
        let fresh = gradient.clone().mul_scalar(1.0 - config.momentum);
        let (momentum, own) = match self.states.remove(&id.val()) {
            Some(state) => {
                let before = state.momentum.reshape(dims);
                let own = state.weight.map(|weight| weight.reshape(dims));
                (before.mul_scalar(config.momentum) + fresh.clone(), own)
            }
            None => (fresh.clone(), None),
        };
        let direction = match config.nesterov {
            true => momentum.clone().mul_scalar(config.momentum) + fresh,
            false => momentum.clone(),
        };
        let update = config.newton_schulz.orthogonalize(direction);
        let lr = lr * config.learning_rate;
        let scale = lr * config.scale.factor(dims[D - 2], dims[D - 1]);
        let weight = own.unwrap_or_else(|| parameter.cast(FloatDType::F32));
        let kept = weight.mul_scalar(1.0 - lr * config.weight_decay);
        let weight = kept - update.mul_scalar(scale);
        let elements = dims.iter().product::<usize>();
        let (parameter, own) = match dtype {
            DType::F32 => (weight, None),
            _ => {
                let own = weight.clone().reshape([elements]);
                (weight.cast(dtype), Some(own))
            }
        };
        let state = MuonState {
            momentum: momentum.reshape([elements]),
            weight: own,
        };
        self.states.insert(id.val(), state);
        parameter
    }
}

/// Mapper that updates the parameters of Muon.
struct Step<'a> {
    optimizer: &'a mut Muon,
    path: Vec<String>,
    lr: f64,
    gradients: GradientsParams,
    any: bool,
}

impl ModuleMapper for Step<'_> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let config = &self.optimizer.config;
        if !config.takes(param.id, &self.path.join("."), D) {
            return param;
        }
        let Some(gradient) = self.gradients.remove::<D>(param.id) else {
            return param;
        };
        self.any = true;
        let (id, weight, mapper) = param.consume();
        let tracking = Tracking::of(&weight);
        let gradient = gradient.without_autodiff();
        let made = self
            .optimizer
            .update(self.lr, id, weight.without_autodiff(), gradient);
        Param::from_mapped_value(id, tracking.restore(made, id), mapper)
    }
}
