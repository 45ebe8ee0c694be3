//! Conversion of quantized tensors to the other order of block scales.

use cubecl::{client::Client, server::Handle};

use super::swizzle;
use crate::{
    Layout, Nvfp4Error, StoredForm, Usage,
    moe::groups::GroupOffsets,
    tensor::{DeviceQuantized, Groups},
};

/// Returns `packed` with its block scales in the order of `form`, in rows or in 128x4 tiles, which
/// start anew at each of its groups: unchanged, or after a pass over the scales. Only the tiles are
/// padded.
///
/// # Errors
/// Returns an error if a buffer is smaller than its shape, if values are stored instead of codes,
/// or if groups with offsets are packed along their rows.
pub fn in_form(
    client: &Client,
    packed: &DeviceQuantized,
    form: StoredForm,
) -> Result<DeviceQuantized, Nvfp4Error> {
    packed.check("packed")?;
    packed.groups.check(packed.rows())?;
    if !packed.is_packed() {
        return Err(Nvfp4Error::value(
            "packed",
            "bf16 values",
            "codes and block scales",
        ));
    }
    let form = match form.has_tiles() {
        true => StoredForm::Tiles,
        false => StoredForm::Rows,
    };
    if packed.layout.form == form {
        return Ok(packed.clone());
    }
    Ok(DeviceQuantized {
        scales: reordered(client, packed, form)?,
        layout: Layout {
            form,
            ..packed.layout
        },
        ..packed.clone()
    })
}

/// Returns the block scales of `packed`, converted to the order of `form`.
fn reordered(
    client: &Client,
    packed: &DeviceQuantized,
    form: StoredForm,
) -> Result<Handle, Nvfp4Error> {
    let (scales, outer, blocks) = (&packed.scales, packed.outer(), packed.blocks());
    let batch = |count, rows, blocks| match form.has_tiles() {
        true => swizzle::swizzle_batch(client, scales, count, rows, blocks),
        false => swizzle::unswizzle_batch(client, scales, count, rows, blocks),
    };
    match (&packed.groups, packed.usage()) {
        (Groups::One, _) => batch(1, outer, blocks),
        (&Groups::Batch(count), Usage::Rowwise) => batch(count, outer / count, blocks),
        // Stacked matrices, each stored transposed.
        (&Groups::Batch(count), Usage::Columnwise) => batch(count, outer, blocks / count),
        (Groups::Offsets { offsets, count }, Usage::Rowwise) => {
            let groups = GroupOffsets::new(offsets.clone(), *count)?;
            match form.has_tiles() {
                true => swizzle::swizzle_row_groups(client, scales, outer, blocks, &groups)
                    .map(|(scales, _)| scales),
                false => swizzle::unswizzle_row_groups(client, scales, outer, blocks, &groups),
            }
        }
        (Groups::Offsets { .. }, Usage::Columnwise) => Err(Nvfp4Error::value(
            "packed",
            "groups with offsets, packed along Usage::Columnwise",
            "such groups packed along Usage::Rowwise, or Groups::Batch",
        )),
    }
}
