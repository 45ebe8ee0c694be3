//! Cube: launches of the CubeCL kernels.

use burn_core::backend::tensor::FloatTensor;
use burn_cubecl::{CubeBackend, kernel::into_contiguous};
use nvfp4_formats::{AmaxGranularity, BlockScaling, StoredForm, Usage};
use nvfp4_formats::{AmaxGranularity, BlockScaling, Usage};
use nvfp4_kernels::moe::GroupOffsets;
use nvfp4_kernels::quantize::{self, QuantRequest};
use nvfp4_kernels::tensor::{DeviceNvfp4Params, DeviceRounding, Groups};

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
        let request = QuantRequest {
            amax: &global.handle,
            scope: AmaxGranularity::PerTensor,
            copy: DeviceNvfp4Params {
                scaling: BlockScaling::Static,
                layout: form.scale_layout(),
                ..DeviceNvfp4Params::new(DeviceRounding::Nearest)
            },
        };
        let client = &x.tensor.client;
        let made = match device_groups(groups) {
            Groups::Offsets { offsets, count } => {
                let groups = GroupOffsets { offsets, count };
                let request = Some(&request);
                let made =
                    quantize::quantize_side_by_side(client, &x.matrix, &groups, request, None);
                launched(made).0.expect("the rowwise one was requested")
            }
            groups => launched(quantize::quantize(
                client, &x.matrix, &groups, usage, &request,
            )),
        };
        let layout = count.layout((rows, cols), usage, &STATIC, form);
        to_burn(&x.tensor, made, count, layout)
    }
}
