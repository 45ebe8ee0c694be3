//! `nvfp4 dev oracle cvt-rs`: finds the order of the random bits in a stochastic-rounding conversion.

use anyhow::Result;
use clap::Args;

use super::arguments::TestedDeviceOption;

#[derive(Args)]
// A build without kernels reads only the device.
#[cfg_attr(not(any(feature = "cpu", feature = "cuda")), allow(dead_code))]
pub(super) struct CvtRs {
    #[command(flatten)]
    device: TestedDeviceOption,
    /// Compare this many random inputs
    #[arg(long, value_name = "N", default_value_t = 1 << 20)]
    count: usize,
}

#[cfg(not(any(feature = "cpu", feature = "cuda")))]
impl CvtRs {
    pub(super) fn run(self) -> Result<()> {
        self.device.refuse()
    }
}

#[cfg(any(feature = "cpu", feature = "cuda"))]
impl CvtRs {
    pub(super) fn run(self) -> Result<()> {
        use anyhow::{Context, ensure};
        use nvfp4::formats::reference;
        use nvfp4::kernels::bring_up;

        use super::device::TestedDevice;

        let TestedDevice {
            client, hardware, ..
        } = TestedDevice::open(self.device.device)?;
        let instruction = bring_up::has_stochastic_instruction(&client);
        println!("device  {hardware}");
        println!(
            "rounds  {}",
            if instruction {
                "by cvt.rs.satfinite.e2m1x4.f32"
            } else {
                "in software: this device has no stochastic conversion"
            }
        );
        let ask =
            |questions: &[reference::Question]| bring_up::answer_random_bits(&client, questions);
        let bits = reference::read_random_bits(ask)
            .context("the bits of the device are in no order of eight for each element")?;
        println!("element random bits, the most significant first");
        for (element, positions) in bits.positions.iter().enumerate() {
            let positions: Vec<String> = positions.iter().rev().map(u8::to_string).collect();
            println!("{element:>7} {}", positions.join(" "));
        }
        let software = bits == reference::RandomBits::software();
        println!(
            "{} the order of the software form (byte i rounds element i)",
            if software { "this is" } else { "this is not" }
        );
        let found = reference::compare_random_bits(&bits, self.count, ask)?;
        println!(
            "{} of {} random questions answered as the oracle does in this order",
            found.questions - found.different,
            found.questions
        );
        if let Some(((values, word), answer, expected)) = found.first {
            println!(
                "first difference: {values:?} by {word:#010x} gave {answer:#06x}, the oracle \
                 {expected:#06x}"
            );
        }
        ensure!(
            found.different == 0,
            "the device differs from the oracle in {} of {} answers",
            found.different,
            found.questions
        );
        Ok(())
    }
}
