//! Tests of the formats and the oracle.

mod support;

mod accuracy;
mod attention;
mod golden;
mod oracle;
mod params;
mod stochastic;
