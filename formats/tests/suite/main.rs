//! Tests of the formats and the oracle.

mod support;

mod accuracy;
mod golden;
mod oracle;
mod stochastic;
