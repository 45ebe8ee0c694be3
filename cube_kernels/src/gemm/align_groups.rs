//! Moves groups along K to a wider alignment. `tcgen05` reads 64 columns at a time, whereas
//! quantizers align groups to a block or to the size of their transform. The same pass copies the
//! codes and rearranges block scales into the 128x4 tiles that the kernel reads.

use cubecl::prelude::*;

use super::{materialize::Materialized, operand::OperandLayout};
use crate::{
    BLOCK, Nvfp4Error, StoredForm,
    format::{padding::padded_bound, swizzle},
    launch::{buffer, grid},
    memory::{address_type, allocate},
    moe::{GroupOffsets, groups::find_group},
    tensor::DeviceQuantized,
};

/// Alignment of the groups in columns: a step of `tcgen05.mma`.
const STEP: usize = 64;
/// Blocks per step.
const BLOCKS: usize = STEP / BLOCK;

/// Groups along K that begin at multiples of 64.
pub(crate) struct AlignedGroups {
    /// Offsets of the groups.
    pub offsets: GroupOffsets,
    /// Upper bound of the number of columns, whatever the group sizes.
    pub k: usize,
}

impl AlignedGroups {
    /// Rounds up the size of each of `groups`, which have `k` columns in total.
    ///
    /// # Errors
    /// Returns an error if a number does not fit 32 bits.
    pub fn of(client: &Client, groups: &GroupOffsets, k: usize) -> Result<Self, Nvfp4Error> {
        Ok(Self {
            offsets: groups.aligned(client, k, STEP)?,
            // Groups consist of whole blocks.
            k: BLOCK * padded_bound(k / BLOCK, groups.count, BLOCKS),
        })
    }

    /// Copies `packed`, whose columns are in `groups`, to the aligned offsets of `self`. Each group
    /// is padded with zeros, and block scales are arranged in 128x4 tiles.
    ///
    /// # Errors
    /// Returns an error if the block scales are in tiles, which cannot be split into groups.
    pub fn arrange(
        &self,
        client: &Client,
        packed: &DeviceQuantized,
        groups: &GroupOffsets,
    ) -> Result<Materialized, Nvfp4Error> {
        if packed.layout.form == StoredForm::Tiles {
            return Err(Nvfp4Error::value(
                "scales",
                format!("{:?} in groups along K", packed.layout.form),
                "block scales in rows",
            ));
        }
        let (rows, blocks) = (packed.outer(), packed.blocks());
        let steps = self.k / STEP;
        let padded_rows = rows.next_multiple_of(128);
        let items = padded_rows * steps;
        let codes = allocate(client, rows * self.k / 2);
        let scales = allocate(client, swizzle::padded_len(rows, steps * BLOCKS));
        let (count, dim) = grid(client, items);
        // SAFETY: the operand was checked against its shape; the kernel masks its reads by it, and
        // writes within `rows` rows, `padded_rows` of scales, of `steps` steps.
        unsafe {
            align_groups_kernel::launch_unchecked(
                client,
                count,
                dim,
                address_type(rows * self.k),
                SparseGroupsLaunch::new(
                    buffer(&packed.codes, rows * blocks),
                    buffer(&packed.scales, rows * blocks),
                    groups.arg(),
                    blocks,
                ),
                self.offsets.arg(),
                buffer(&codes, rows * steps * 2),
                buffer(&scales, items),
                rows,
                steps,
                groups.count,
            );
        }
        Ok(Materialized {
            layout: OperandLayout::Packed,
            rows,
            stack: 1,
            elements: codes,
            scales,
        })
    }
}

/// An operand with groups along K at their original offsets.
#[derive(CubeType, CubeLaunch)]
pub struct SparseGroups {
    /// Two words of codes per block.
    codes: Box<[Vector<u32, Const<2>>]>,
    /// A byte per block, in rows.
    scales: Box<[u8]>,
    /// Offsets of the groups, multiples of a block, and the end of the last group.
    offsets: Box<[u32]>,
    /// Blocks per row.
    blocks: usize,
}

/// Each unit moves 64 columns of a row: two vectors of codes and a word of scales. Rows after the
/// last one get zero scales.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn align_groups_kernel(
    from: SparseGroups,
    aligned: &[u32],
    codes: &mut [Vector<u32, Const<4>>],
    scales: &mut [u32],
    rows: usize,
    steps: usize,
    groups: usize,
) {
    let items = rows.div_ceil(128usize) * 128usize * steps;
    let mut item = ABSOLUTE_POS;
    while item < items {
        let row = item / steps;
        let step = item % steps;
        let position = step * comptime!(STEP);
        let group = find_group(aligned, groups, position);
        let within = position - min(aligned[group] as usize, position);
        let start = from.offsets[group] as usize;
        let end = from.offsets[group + 1usize] as usize;
        let mut low = Vector::<u32, Const<4>>::new(0u32);
        let mut high = Vector::<u32, Const<4>>::new(0u32);
        let mut word = 0u32;
        if row < rows {
            #[unroll]
            for i in 0..BLOCKS {
                let column = start + within + comptime!(i * BLOCK);
                let block = column / comptime!(BLOCK);
                if column < end && block < from.blocks {
                    let at = row * from.blocks + block;
                    let pair = from.codes[at];
                    let first = comptime!(i % 2 * 2);
                    if comptime!(i < 2) {
                        low.insert(first, pair.extract(0usize));
                        low.insert(comptime!(first + 1), pair.extract(1usize));
                    } else {
                        high.insert(first, pair.extract(0usize));
                        high.insert(comptime!(first + 1), pair.extract(1usize));
                    }
                    word |= u32::cast_from(from.scales[at]) << comptime!(8 * i as u32);
                }
            }
            codes[item * 2usize] = low;
            codes[item * 2usize + 1usize] = high;
        }
        // Word index of the row within the tile of 128 rows and of the step.
        let line = (row / 128usize * steps + step) * 32usize + row % 32usize;
        scales[line * 4usize + row % 128usize / 32usize] = word;
        item += CUBE_COUNT * CUBE_DIM as usize;
    }
}

#[cfg(all(test, feature = "cpu"))]
mod tests {
    use super::*;
    use cubecl::server::Handle;

    use crate::{
        Layout, Usage,
        memory::{download, upload},
        reference::philox::philox4x32,
    };

    /// Codes and scales of each group start at a multiple of 64, padded with zeros.
    #[test]
    fn groups_are_moved() {
        let client = crate::cpu_client();
        // Stored columns after the last group belong to no group.
        for (sizes, rows, behind) in [
            (vec![16, 0, 80, 64, 48], 3, 32),
            (vec![0, 0, 160], 130, 0),
            (vec![64, 128], 1, 16),
            (vec![0], 2, 16),
        ] {
            let k = sizes.iter().sum::<usize>() + behind;
            let blocks = k / BLOCK;
            let bytes = |stream, len: usize| -> Vec<u8> {
                (0..len as u32)
                    .map(|i| philox4x32([i, stream, 0, 0], [1, 2])[0] as u8 | 1)
                    .collect()
            };
            let (codes, scales) = (bytes(0, rows * blocks * 8), bytes(1, rows * blocks));
            let mut offsets = vec![0u32];
            for size in &sizes {
                offsets.push(offsets[offsets.len() - 1] + *size as u32);
            }
            let words = upload(&client, bytemuck::cast_slice(&offsets));
            let groups = GroupOffsets::new(words, sizes.len()).unwrap();
            let memory = |bytes: &[u8]| upload(&client, bytes);
            let amax = memory(&1f32.to_le_bytes());
            let layout = Layout::nvfp4(rows, k, Usage::Rowwise);
            let packed = DeviceQuantized::new(layout, (memory(&codes), memory(&scales), amax));
            let aligned = AlignedGroups::of(&client, &groups, k).unwrap();
            let moved = aligned.arrange(&client, &packed, &groups).unwrap();

            let new_blocks = aligned.k / BLOCK;
            let mut expected_codes = vec![0u8; rows * new_blocks * 8];
            let mut expected_scales = vec![0u8; rows * new_blocks];
            let mut start = 0;
            for (size, offset) in sizes.iter().zip(&offsets) {
                for row in 0..rows {
                    for block in 0..size / BLOCK {
                        let from = row * blocks + *offset as usize / BLOCK + block;
                        let to = row * new_blocks + start / BLOCK + block;
                        expected_scales[to] = scales[from];
                        expected_codes[to * 8..][..8].copy_from_slice(&codes[from * 8..][..8]);
                    }
                }
                start += size.next_multiple_of(STEP);
            }
            assert!(start <= aligned.k, "{sizes:?}");
            let expected = swizzle::swizzle(&expected_scales, rows, new_blocks);
            let read = |handle: &Handle, len| download(&client, handle, len).unwrap();
            assert_eq!(read(&moved.elements, expected_codes.len()), expected_codes);
            assert_eq!(read(&moved.scales, expected.len()), expected, "{sizes:?}");
        }
    }

    /// Operands whose block scales are in tiles cannot have groups along K.
    #[test]
    fn tiles_of_scales_are_refused() {
        let client = crate::cpu_client();
        let memory = upload(&client, &[0; 1024]);
        let layout = Layout {
            form: StoredForm::Tiles,
            ..Layout::nvfp4(8, 64, Usage::Rowwise)
        };
        let parts = (memory.clone(), memory.clone(), memory.clone());
        let packed = DeviceQuantized::new(layout, parts);
        let groups = GroupOffsets::new(memory, 1).unwrap();
        let aligned = AlignedGroups::of(&client, &groups, 64).unwrap();
        assert!(aligned.arrange(&client, &packed, &groups).is_err());
    }
}
