//! Sorts the choices of some of the experts by expert.

use std::ops::Range;

use super::router::{SortedChoices, sort_choices};

/// Unit sizes in rows by which [`ChoiceWindow::earlier`] counts: single rows, and the sizes of
/// which the blocks and the transforms of a columnwise tensor take whole numbers.
pub const EARLIER_UNITS: [usize; 5] = [1, 16, 32, 64, 128];

/// Choices of some consecutive experts, sorted by expert and stable within an expert: the section
/// of [`SortedChoices`] that starts at the first of these experts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChoiceWindow {
    /// Choice at each place. Places after those of the experts contain the number of all choices,
    /// which is not a valid choice.
    pub choices: Vec<u32>,
    /// Place of each choice. Choices of other experts contain the number of all choices, which is
    /// not a valid place.
    pub places: Vec<u32>,
    /// Start of each expert's choices, and the end of the last one's.
    pub offsets: Vec<u32>,
    /// Number of row units, for each of [`EARLIER_UNITS`], that the choices of earlier experts
    /// take, rounded up per expert.
    pub earlier: Vec<u32>,
    /// Number of choices of each expert, for all experts.
    pub counts: Vec<u32>,
}

/// Sorts `chosen`, indices of `experts` experts, by expert, and keeps the choices of the experts
/// `held`. An index that is not an expert is not counted.
pub fn sort_window(chosen: &[u32], experts: usize, held: Range<usize>) -> ChoiceWindow {
    let SortedChoices {
        choices,
        places,
        offsets,
        counts,
    } = sort_choices(chosen, experts);
    let (start, end) = (offsets[held.start], offsets[held.end]);
    let none = chosen.len() as u32;
    let mut kept = vec![none; chosen.len()];
    kept[..(end - start) as usize].copy_from_slice(&choices[start as usize..end as usize]);
    let place = |place: u32| match (start..end).contains(&place) {
        true => place - start,
        false => none,
    };
    let before = &counts[..held.start];
    let units = |unit: usize| before.iter().map(|count| count.div_ceil(unit as u32)).sum();
    ChoiceWindow {
        choices: kept,
        places: places.into_iter().map(place).collect(),
        offsets: (offsets[held.start..=held.end].iter())
            .map(|offset| offset - start)
            .collect(),
        earlier: EARLIER_UNITS.map(units).to_vec(),
        counts,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_of_the_last_two_of_four_experts() {
        let chosen = [2, 0, 9, 2, 1, 0, 3];
        let window = sort_window(&chosen, 4, 2..4);
        assert_eq!(window.choices, [0, 3, 6, 7, 7, 7, 7]);
        assert_eq!(window.places, [0, 7, 7, 1, 7, 7, 2]);
        assert_eq!(window.offsets, [0, 2, 3]);
        assert_eq!(window.earlier, [3, 2, 2, 2, 2]);
        assert_eq!(window.counts, [2, 1, 2, 1]);
    }

    #[test]
    fn all_experts_have_all_choices() {
        let chosen: Vec<u32> = (0..40).map(|i| i * i % 7).collect();
        let (window, sorted) = (sort_window(&chosen, 7, 0..7), sort_choices(&chosen, 7));
        assert_eq!(window.choices, sorted.choices);
        assert_eq!(window.places, sorted.places);
        assert_eq!(window.offsets, sorted.offsets);
        assert_eq!(window.counts, sorted.counts);
        assert_eq!(window.earlier, [0; 5]);
    }
}
