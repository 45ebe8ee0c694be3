//! Name of the group, in a file below the commands that start other commands of the group.

/// Name of the group on the command line.
pub(crate) const NAME: &str = "dev";
