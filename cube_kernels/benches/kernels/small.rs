//! Kernels of a few words, whose time is that of a launch.

use nvfp4_kernels::{graph, quantize};

use crate::{harness::Section, inputs::words};

/// Times them from a graph, beside an empty kernel.
pub fn all(section: &mut Section<'_>) {
    let client = section.client();
    let section = &mut section.captured();
    section.empty();
    let memory = || words(&client, std::iter::repeat_n(0, 4));
    let [from, to, offset] = [(); 3].map(|()| memory());
    section.time("four words set", 16.0, |_| {
        graph::set_words(&client, &to, [1, 2, 3, 4]).unwrap();
    });
    section.time("four words copied", 32.0, |_| {
        graph::copy_words(&client, &from, &to, 4).unwrap();
    });
    section.time("random offset advanced", 16.0, |_| {
        quantize::advance_offset(&client, &offset, 1).unwrap();
    });
}
