//! Table of the tiles of sequences that start at offsets in device memory.
//!
//! The host does not read the offsets, so the table is allocated for the largest possible number of
//! tiles. A first kernel computes the prefix sums of the sequences' tile counts
//! (`GroupOffsets::rescaled`); a second one looks up each tile's sequence in them.

use cubecl::{prelude::*, server::Handle};

use super::tiles::ENTRY;
use crate::{
    Nvfp4Error,
    attention::{
        Attention, Sequences,
        mma::{
            self,
            problem::{Problem, Side, extent, own_len},
        },
    },
    launch::{buffer, grid},
    memory::allocate,
    moe::groups::{GroupOffsets, find_group},
};

/// Tiles of one side.
pub(super) struct Table {
    /// Memory of the table.
    pub handle: Handle,
    /// Number of tiles that it has room for, at least the number of tiles.
    pub capacity: usize,
}

impl Table {
    /// Returns the number of words of the table.
    pub fn len(&self) -> usize {
        (self.capacity + 1) * ENTRY
    }
}

/// Launches the kernels that write the table of `attention`'s tiles of `rows` rows of one side.
/// Returns `None` for sequences of equal length, which need no table.
///
/// # Errors
/// Returns an error if the offsets do not fit.
pub(super) fn table(
    client: &Client,
    attention: &Attention,
    side: Side,
    rows: usize,
) -> Result<Option<Table>, Nvfp4Error> {
    let Sequences::Offsets { q, k, count } = &attention.sequences else {
        return Ok(None);
    };
    let (offsets, tokens) = match side {
        Side::Queries => (q, attention.q.tokens),
        Side::Keys => (k, attention.k.tokens),
    };
    let groups = GroupOffsets::new(offsets.clone(), *count)?;
    let starts = groups.rescaled(client, tokens, rows, 1)?;
    let capacity = mma::tiles(&attention.sequences, tokens, rows);
    let table = Table {
        handle: allocate(client, (capacity + 1) * ENTRY * 4),
        capacity,
    };
    let (cubes, dim) = grid(client, capacity);
    // SAFETY: the kernel writes no more tiles than there is room for, and offsets were checked
    // against their memory.
    unsafe {
        sm90_tiles_kernel::launch_unchecked(
            client,
            cubes,
            dim,
            mma::problem(attention),
            starts.arg(),
            buffer(&table.handle, table.len()),
            capacity as u32,
            side,
            rows,
        );
    }
    Ok(Some(table))
}

/// Writes the table of the tiles of `rows` rows of one side: their number, at most `capacity`, and
/// one entry per tile. Sequence `s` has the tiles `starts[s]..starts[s + 1]`; the tokens that
/// belong to no sequence have the following tiles.
#[cube(launch_unchecked, create_dummy_kernel)]
pub fn sm90_tiles_kernel(
    problem: Problem,
    starts: &[u32],
    tiles: &mut [u32],
    capacity: u32,
    #[comptime] side: Side,
    #[comptime] rows: usize,
) {
    let height = comptime!(rows as u32);
    let named = starts[problem.sequences as usize];
    let rest = own_len(extent(&problem, problem.sequences, side, true), side);
    let count = min(named + rest.div_ceil(height), capacity);
    if ABSOLUTE_POS == 0usize {
        tiles[0usize] = count;
    }
    let mut tile = ABSOLUTE_POS;
    while tile < count as usize {
        let mut index = problem.sequences;
        if (tile as u32) < named {
            index = find_group(starts, problem.sequences as usize, tile) as u32;
        }
        let nobody = index == problem.sequences;
        let own = extent(&problem, u32::reinterpret(index), side, true);
        let row = (tile as u32 - starts[index as usize]) * height;
        // If offsets do not ascend, a tile may lie past its sequence. It then has no rows.
        let exists = row < own_len(own, side);
        let at = (tile + 1usize) * ENTRY;
        tiles[at] = select(exists, own.q, 0u32);
        tiles[at + 1usize] = select(exists, own.q_len, 0u32);
        tiles[at + 2usize] = select(exists, own.k, 0u32);
        tiles[at + 3usize] = select(exists, own.k_len, 0u32);
        tiles[at + 4usize] = select(exists, row, 0u32);
        tiles[at + 5usize] = u32::cast_from(nobody);
        tile += CUBE_COUNT * CUBE_DIM as usize;
    }
}

#[cfg(all(test, feature = "cpu"))]
mod tests {
    use super::*;
    use crate::{
        AttentionParams,
        attention::Heads,
        memory::{download, upload},
        tensor::FloatKind,
    };

    const ROWS: usize = 128;

    /// Returns the table of one side, with one entry per tile.
    fn found(offsets: [&[u32]; 2], tokens: [usize; 2], side: Side) -> (Vec<[u32; 6]>, usize) {
        let client = crate::cpu_client();
        let [q, k] = tokens.map(|tokens| Heads::empty(&client, [tokens, 1, 2], FloatKind::Bf16));
        let [q_offsets, k_offsets] =
            offsets.map(|offsets| upload(&client, bytemuck::cast_slice(offsets)));
        let attention = Attention {
            q,
            v: k.clone(),
            k,
            sequences: Sequences::Offsets {
                q: q_offsets,
                k: k_offsets,
                count: offsets[0].len() - 1,
            },
            params: AttentionParams::causal(2),
        };
        let table = table(&client, &attention, side, ROWS).unwrap().unwrap();
        let bytes = download(&client, &table.handle, table.len() * 4).unwrap();
        let words: Vec<u32> = bytemuck::pod_collect_to_vec(&bytes);
        let entries = words[ENTRY..].chunks(ENTRY).take(words[0] as usize);
        let entries = entries.map(|entry| std::array::from_fn(|i| entry[i]));
        (entries.collect(), table.capacity)
    }

    /// Returns the offsets of sequences of these lengths.
    fn offsets_of(lengths: &[u32]) -> Vec<u32> {
        let mut offsets = vec![0];
        for length in lengths {
            offsets.push(offsets[offsets.len() - 1] + length);
        }
        offsets
    }

    /// Tables contain the tiles of all sequences, one after another, and of the tokens after them.
    #[test]
    fn tables_have_the_tiles_of_all_sequences() {
        let lengths: [(u32, u32); 14] = [
            (0, 5),
            (1, 1),
            (15, 0),
            (16, 16),
            (0, 0),
            (17, 40),
            (127, 127),
            (128, 300),
            (129, 128),
            (300, 2),
            (0, 0),
            (256, 257),
            (3, 385),
            (0, 0),
        ];
        let own: Vec<u32> = lengths.iter().map(|l| l.0).collect();
        let other: Vec<u32> = lengths.iter().map(|l| l.1).collect();
        for behind in [[0u32, 0], [1, 0], [128, 3], [200, 129]] {
            for (side, flip) in [(Side::Queries, false), (Side::Keys, true)] {
                // Use these lengths for the side whose tiles are listed.
                let (own, other) = if flip { (&other, &own) } else { (&own, &other) };
                let (own, other) = (offsets_of(own), offsets_of(other));
                let last = |offsets: &[u32]| offsets[offsets.len() - 1];
                let tokens = [last(&own) + behind[0], last(&other) + behind[1]];
                let mut expected = Vec::new();
                for index in 0..own.len() {
                    let nobody = index + 1 == own.len();
                    let end = |offsets: &[u32], all| if nobody { all } else { offsets[index + 1] };
                    let own_len = end(&own, tokens[0]) - own[index];
                    let other_len = end(&other, last(&other)) - other[index];
                    for row in (0..own_len).step_by(ROWS) {
                        let mine = [own[index], own_len];
                        let theirs = [other[index], other_len];
                        let [q, k] = if flip { [theirs, mine] } else { [mine, theirs] };
                        expected.push([q[0], q[1], k[0], k[1], row, u32::from(nobody)]);
                    }
                }
                let mut sides = [(&own[..], tokens[0]), (&other[..], tokens[1])];
                if flip {
                    sides.reverse();
                }
                let [q, k] = sides;
                let (found, capacity) = found([q.0, k.0], [q.1 as usize, k.1 as usize], side);
                assert_eq!(found, expected, "{side:?}, {behind:?} behind");
                assert!(found.len() <= capacity);
            }
        }
    }

    /// For any offsets, no tile is outside the tokens or past its sequence, and there are no more
    /// tiles than the table has room for.
    #[test]
    fn offsets_that_cannot_be_name_no_token_that_is_not_there() {
        let tokens = [300usize, 200];
        let offsets: [[&[u32]; 2]; 5] = [
            [&[0, 1000, 2000], &[0, 1000, 2000]],
            [&[0, 300, 0, 300, 0], &[0, 200, 0, 200, 0]],
            [&[300, 200, 100, 0], &[200, 100, 50, 0]],
            [&[0, u32::MAX, 0, u32::MAX], &[u32::MAX, 0, u32::MAX, 0]],
            [&[7, 5, 299, 4, 298, 3, 300], &[0; 7]],
        ];
        for offsets in offsets {
            for side in [Side::Queries, Side::Keys] {
                let (found, capacity) = found(offsets, tokens, side);
                assert!(found.len() <= capacity, "{offsets:?}");
                for entry in found {
                    let [q, q_len, k, k_len, row, _] = entry.map(|word| word as usize);
                    let fits = q + q_len <= tokens[0] && k + k_len <= tokens[1];
                    let own_len = match side {
                        Side::Queries => q_len,
                        Side::Keys => k_len,
                    };
                    let is_empty = [q, q_len, k, k_len, row] == [0; 5];
                    assert!(
                        fits && (row < own_len || is_empty),
                        "{offsets:?}: {entry:?}"
                    );
                }
            }
        }
    }
}
