//! Cube: launches of the CubeCL kernels.

use burn_core::backend::tensor::FloatTensor;
use burn_cubecl::{CubeBackend, kernel::into_contiguous};
use nvfp4_formats::{StoredForm, Usage};
use nvfp4_kernels::quantize::{Quantize, TargetSpec};

use super::super::cube::tensors::{Source, device_groups, launched, to_burn};
use super::super::tensors::{QuantizedMatrix, RowGroups};
use super::super::{trace_op, usage_name};
use super::{InferenceOps, STATIC};

impl InferenceOps for CubeBackend {
    fn nvfp4_quantize_static(
        x: FloatTensor<Self>,
        global: FloatTensor<Self>,
        groups: RowGroups<Self>,
        form: StoredForm,
    ) -> QuantizedMatrix<Self> {
        let (x, global) = (Source::new(x), into_contiguous(global));
        let (usage, count) = (Usage::Rowwise, groups.count());
        let (rows, cols) = x.shape();
        trace_op("quantize", usage_name(usage), rows, cols);
        let groups = device_groups(groups);
        let request = Quantize::new(&x.matrix).groups(&groups);
        let target = TargetSpec::new(STATIC).form(form).amax(&global.handle);
        let request = request.rowwise(target);
        let made = launched(request.launch(&x.tensor.client)).into_one();
        let layout = count.layout((rows, cols), usage, &STATIC, form);
        to_burn(&x.tensor, made, count, layout)
    }
}
