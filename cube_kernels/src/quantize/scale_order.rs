//! Conversion of quantized tensors to the other order of block scales.

use cubecl::{client::Client, server::Handle};

use super::swizzle;
use crate::{
    Layout, Nvfp4Error, ScaleLayout, StoredForm, Usage,
    moe::groups::GroupOffsets,
    tensor::{DeviceQuantized, Groups},
};

/// Returns `packed` with its block scales in rows, for consumers that do not read 128x4 tiles:
/// unchanged, or after a pass over the scales.
///
/// # Errors
/// Returns an error if a buffer is smaller than its shape, if values are stored instead of codes,
/// or if groups with offsets are packed along their rows.
pub fn scales_in_rows(
    client: &Client,
    packed: &DeviceQuantized,
) -> Result<DeviceQuantized, Nvfp4Error> {
    in_order(client, packed, ScaleLayout::Compact)
}

/// Returns `packed` with its block scales in 128x4 tiles, which start anew at each of its groups,
/// for tensors that are read more than once: unchanged, or after a pass over the scales. Only the
/// tiles are padded.
///
/// # Errors
/// See [`scales_in_rows`].
pub fn scales_in_tiles(
    client: &Client,
    packed: &DeviceQuantized,
) -> Result<DeviceQuantized, Nvfp4Error> {
    in_order(client, packed, ScaleLayout::Swizzled128x4)
}

fn in_order(
    client: &Client,
    packed: &DeviceQuantized,
    order: ScaleLayout,
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
    let form = StoredForm::Packed(order);
    if packed.layout.form == form {
        return Ok(packed.clone());
    }
    Ok(DeviceQuantized {
        scales: reordered(client, packed, order)?,
        layout: Layout {
            form,
            ..packed.layout
        },
        ..packed.clone()
    })
}

/// Returns the block scales of `packed`, converted to the other order `order`.
fn reordered(
    client: &Client,
    packed: &DeviceQuantized,
    order: ScaleLayout,
) -> Result<Handle, Nvfp4Error> {
    let (scales, outer, blocks) = (&packed.scales, packed.outer(), packed.blocks());
    let batch = |count, rows, blocks| match order {
        ScaleLayout::Swizzled128x4 => swizzle::swizzle_batch(client, scales, count, rows, blocks),
        ScaleLayout::Compact => swizzle::unswizzle_batch(client, scales, count, rows, blocks),
    };
    match (&packed.groups, packed.usage()) {
        (Groups::One, _) => batch(1, outer, blocks),
        (&Groups::Batch(count), Usage::Rowwise) => batch(count, outer / count, blocks),
        // Stacked matrices, each stored transposed.
        (&Groups::Batch(count), Usage::Columnwise) => batch(count, outer, blocks / count),
        (Groups::Offsets { offsets, count }, Usage::Rowwise) => {
            let groups = GroupOffsets::new(offsets.clone(), *count)?;
            match order {
                ScaleLayout::Swizzled128x4 => {
                    swizzle::swizzle_row_groups(client, scales, outer, blocks, &groups)
                        .map(|(scales, _)| scales)
                }
                ScaleLayout::Compact => {
                    swizzle::unswizzle_row_groups(client, scales, outer, blocks, &groups)
                }
            }
        }
        (Groups::Offsets { .. }, Usage::Columnwise) => Err(Nvfp4Error::value(
            "packed",
            "groups with offsets, packed along Usage::Columnwise",
            "such groups packed along Usage::Rowwise, or Groups::Batch",
        )),
    }
}
