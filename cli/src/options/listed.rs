//! Values of options that are no `ValueEnum`: parsed by `FromStr`, and listed in `--help`,
//! completions and man pages as those of a `ValueEnum` are.

use std::error::Error;
use std::ffi::OsStr;
use std::marker::PhantomData;
use std::str::FromStr;

use clap::builder::{PossibleValue, StringValueParser, TypedValueParser};
use clap::{Arg, Command};

/// Parser of a `T` that lists values.
pub(crate) struct Listed<T> {
    values: fn() -> Vec<PossibleValue>,
    parsed: PhantomData<fn() -> T>,
}

// Derived, this would require `T: Clone`.
impl<T> Clone for Listed<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Listed<T> {}

/// Returns a parser that lists `values`. It accepts what the `FromStr` of `T` accepts, which may be
/// more: `cuda:3` for `cuda:N`, or the file of a recipe.
pub(crate) fn listed<T>(values: fn() -> Vec<PossibleValue>) -> Listed<T> {
    Listed {
        values,
        parsed: PhantomData,
    }
}

impl<T> TypedValueParser for Listed<T>
where
    T: FromStr + Clone + Send + Sync + 'static,
    T::Err: Into<Box<dyn Error + Send + Sync>>,
{
    type Value = T;

    fn parse_ref(
        &self,
        command: &Command,
        arg: Option<&Arg>,
        value: &OsStr,
    ) -> Result<T, clap::Error> {
        let parser = StringValueParser::new().try_map(|text: String| text.parse::<T>());
        parser.parse_ref(command, arg, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new((self.values)().into_iter()))
    }
}
