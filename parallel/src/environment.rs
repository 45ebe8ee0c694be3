//! Rank of this process and address of rank 0, from the variables that launchers set.
//!
//! | launcher | rank | rank on its machine | ranks |
//! |---|---|---|---|
//! | `nvfp4 launch`, torchrun | `RANK` | `LOCAL_RANK` | `WORLD_SIZE` |
//! | Open MPI | `OMPI_COMM_WORLD_RANK` | `OMPI_COMM_WORLD_LOCAL_RANK` | `OMPI_COMM_WORLD_SIZE` |
//! | MPICH, Intel MPI (PMI) | `PMI_RANK` | `MPI_LOCALRANKID` | `PMI_SIZE` |
//! | Slurm (`srun`) | `SLURM_PROCID` | `SLURM_LOCALID` | `SLURM_STEP_NUM_TASKS` or `SLURM_NTASKS` |
//! | Kubernetes, indexed job | `JOB_COMPLETION_INDEX` | 0 | `WORLD_SIZE` |
//!
//! The first row whose rank variable is set is used, because launchers nest in this order: torchrun
//! in a Slurm job inherits Slurm's variables. The two MPI families are set by one launcher and must
//! agree. A Slurm rank is used only in a step (`SLURM_STEP_ID`), because a batch script has a rank
//! too.
//!
//! All launchers require `MASTER_ADDR`, the address of rank 0's machine in the network of the run;
//! `MASTER_PORT`, a port that is free there; and `NVFP4_TOKEN`, a secret of at least 16 bytes. Rank
//! 0 listens only on `MASTER_ADDR`. If torchrun's agent uses `MASTER_PORT`
//! (`TORCHELASTIC_USE_AGENT_STORE`), the next port is used.

use std::collections::BTreeMap;
use std::env;

use crate::error::{ParallelError, Result};
use crate::token::Token;

/// Name of the variable with the [`Token`].
pub const TOKEN: &str = "NVFP4_TOKEN";
/// Name of the variable with the address of rank 0.
pub const MASTER_ADDR: &str = "MASTER_ADDR";
/// Name of the variable with the port of rank 0.
pub const MASTER_PORT: &str = "MASTER_PORT";
/// Name of torchrun's variable with the rank.
pub const RANK: &str = "RANK";
/// Name of torchrun's variable with the rank on its machine.
pub const LOCAL_RANK: &str = "LOCAL_RANK";
/// Name of torchrun's variable with the number of ranks.
pub const WORLD_SIZE: &str = "WORLD_SIZE";
/// Name of torchrun's variable with the number of ranks on this machine.
pub const LOCAL_WORLD_SIZE: &str = "LOCAL_WORLD_SIZE";
/// Variable that is set if torchrun itself uses the address at [`MASTER_PORT`].
const AGENT_STORE: &str = "TORCHELASTIC_USE_AGENT_STORE";
/// Variable that is set in a Slurm step, but not in a batch script.
const SLURM_STEP: &str = "SLURM_STEP_ID";

/// Position of a process among the processes of its run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Environment {
    /// Name of the launcher.
    pub launcher: &'static str,
    /// Rank, less than [`world`](Self::world).
    pub rank: usize,
    /// Rank among those of the same machine: the index of its GPU.
    pub local_rank: usize,
    /// Number of ranks.
    pub world: usize,
    /// Address of rank 0.
    pub address: String,
    /// Port of the store on rank 0.
    pub port: u16,
    /// Secret of the run.
    pub token: Token,
}

/// Variables of one launcher.
struct Family {
    name: &'static str,
    rank: &'static str,
    local_rank: Option<&'static str>,
    /// Candidates; the first one that is set is used.
    world: &'static [&'static str],
}

const FAMILIES: [Family; 5] = [
    Family {
        name: "torchrun",
        rank: RANK,
        local_rank: Some(LOCAL_RANK),
        world: &[WORLD_SIZE],
    },
    Family {
        name: "Open MPI",
        rank: "OMPI_COMM_WORLD_RANK",
        local_rank: Some("OMPI_COMM_WORLD_LOCAL_RANK"),
        world: &["OMPI_COMM_WORLD_SIZE"],
    },
    Family {
        name: "PMI",
        rank: "PMI_RANK",
        local_rank: Some("MPI_LOCALRANKID"),
        world: &["PMI_SIZE"],
    },
    Family {
        name: "Slurm",
        rank: "SLURM_PROCID",
        local_rank: Some("SLURM_LOCALID"),
        world: &["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"],
    },
    Family {
        name: "Kubernetes",
        rank: "JOB_COMPLETION_INDEX",
        local_rank: None,
        world: &[WORLD_SIZE],
    },
];

impl Environment {
    /// Returns the environment of this process; `None` if no launcher has set a rank, or there is
    /// only one rank and no address.
    ///
    /// # Errors
    /// Returns an error if a variable is missing, is not a number, or contradicts another one.
    pub fn detect() -> Result<Option<Self>> {
        // Variables that are not UTF-8 are none of these.
        let variables = env::vars_os().filter_map(|(name, value)| {
            Some((name.into_string().ok()?, value.into_string().ok()?))
        });
        Self::from_variables(&variables.collect())
    }

    /// Returns the environment of a process with these variables.
    ///
    /// # Errors
    /// Same as [`detect`](Self::detect).
    pub fn from_variables(variables: &BTreeMap<String, String>) -> Result<Option<Self>> {
        let variables = Variables(variables);
        let present = |family: &&Family| {
            let step = family.name != "Slurm" || variables.get(SLURM_STEP).is_some();
            variables.get(family.rank).is_some() && step
        };
        let Some(family) = FAMILIES.iter().find(present) else {
            // Incomplete launcher variables: if the rank were ignored, each process would train
            // separately.
            if variables.get(LOCAL_RANK).is_some() {
                return Err(variables.missing(RANK, "the rank, as LOCAL_RANK is set"));
            }
            return Ok(None);
        };
        let rank = variables.number(family.rank)?;
        let names = family.world.iter().copied();
        let name = names.clone().find(|name| variables.get(name).is_some());
        let Some(world_name) = name else {
            let expected = format!("the number of ranks, as {} is set", family.rank);
            return Err(variables.missing(family.world[family.world.len() - 1], &expected));
        };
        let world = variables.number(world_name)?;
        if rank >= world {
            let expected = format!("less than {world_name}, which is {world}");
            return Err(variables.wrong(family.rank, &expected));
        }
        let local_rank = match family.local_rank {
            // PMI need not set it.
            Some(name) if family.name != "PMI" || variables.get(name).is_some() => {
                let local = variables.number(name)?;
                if local > rank {
                    let expected = format!("at most {}, which is {rank}", family.rank);
                    return Err(variables.wrong(name, &expected));
                }
                local
            }
            Some(name) if world > 1 && variables.get(LOCAL_RANK).is_none() => {
                let expected = "the rank on its machine, or LOCAL_RANK instead";
                return Err(variables.missing(name, expected));
            }
            Some(_) if world > 1 => variables.number(LOCAL_RANK)?,
            _ => 0,
        };
        variables.agree(family, rank, world)?;
        if world == 1 && variables.get(MASTER_ADDR).is_none() {
            // For example a Slurm step with one task: there is no other rank to find.
            return Ok(None);
        }
        let Some(address) = variables.get(MASTER_ADDR) else {
            let expected = "the address of rank 0's machine in the network of the run";
            return Err(variables.missing(MASTER_ADDR, expected));
        };
        let port = variables.number(MASTER_PORT)?;
        let port = match variables.get(AGENT_STORE) {
            Some("True") => port + 1,
            _ => port,
        };
        let Some(port) = u16::try_from(port).ok().filter(|port| *port > 0) else {
            return Err(variables.wrong(MASTER_PORT, "a port, from 1 to 65535"));
        };
        let Some(token) = variables.get(TOKEN) else {
            let expected = "a secret that all ranks share, such as `openssl rand -hex 32` prints";
            return Err(variables.missing(TOKEN, expected));
        };
        let token = Token::new(token).map_err(|_| ParallelError::Environment {
            variable: TOKEN.into(),
            // The token must not be printed.
            found: format!("{} bytes long", token.len()),
            expected: format!("at least {} bytes long", Token::SHORTEST),
        })?;
        Ok(Some(Self {
            launcher: family.name,
            rank,
            local_rank,
            world,
            address: address.into(),
            port,
            token,
        }))
    }
}

struct Variables<'a>(&'a BTreeMap<String, String>);

impl<'a> Variables<'a> {
    fn get(&self, name: &str) -> Option<&'a str> {
        self.0.get(name).map(|value| &**value)
    }

    fn number(&self, name: &str) -> Result<usize> {
        match self.get(name) {
            Some(value) => value.parse().map_err(|_| self.wrong(name, "a number")),
            None => Err(self.missing(name, "a number")),
        }
    }

    fn missing(&self, name: &str, expected: &str) -> ParallelError {
        ParallelError::Environment {
            variable: name.into(),
            found: "not set".into(),
            expected: expected.into(),
        }
    }

    fn wrong(&self, name: &str, expected: &str) -> ParallelError {
        ParallelError::Environment {
            variable: name.into(),
            found: format!("{:?}", self.get(name).unwrap_or_default()),
            expected: expected.into(),
        }
    }

    /// Checks that the two MPI families, which one launcher sets, agree if both are set.
    fn agree(&self, family: &Family, rank: usize, world: usize) -> Result<()> {
        if family.name != "Open MPI" {
            return Ok(());
        }
        for (name, known, value) in [
            ("PMI_RANK", family.rank, rank),
            ("PMI_SIZE", family.world[0], world),
        ] {
            if self.get(name).is_some() && self.number(name)? != value {
                return Err(self.wrong(name, &format!("{value}, as {known} is")));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COMMON: &[(&str, &str)] = &[
        (MASTER_ADDR, "10.0.0.1"),
        (MASTER_PORT, "29500"),
        (TOKEN, "0123456789abcdef"),
    ];
    const TORCHRUN: &[(&str, &str)] = &[(RANK, "3"), (LOCAL_RANK, "1"), (WORLD_SIZE, "4")];
    const SLURM: &[(&str, &str)] = &[
        ("SLURM_PROCID", "2"),
        ("SLURM_LOCALID", "0"),
        ("SLURM_NTASKS", "8"),
        (SLURM_STEP, "0"),
    ];
    const OPEN_MPI: &[(&str, &str)] = &[
        ("OMPI_COMM_WORLD_RANK", "5"),
        ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
        ("OMPI_COMM_WORLD_SIZE", "6"),
    ];

    fn detect(sets: &[&[(&str, &str)]]) -> Result<Option<Environment>> {
        let pairs = sets.iter().flat_map(|set| set.iter());
        let owned = pairs.map(|(name, value)| (name.to_string(), value.to_string()));
        Environment::from_variables(&owned.collect())
    }

    fn place(sets: &[&[(&str, &str)]]) -> (&'static str, usize, usize, usize) {
        let found = detect(&[sets, &[COMMON]].concat()).unwrap().unwrap();
        (found.launcher, found.rank, found.local_rank, found.world)
    }

    #[test]
    fn every_launcher() {
        assert_eq!(place(&[TORCHRUN]), ("torchrun", 3, 1, 4));
        assert_eq!(place(&[SLURM]), ("Slurm", 2, 0, 8));
        assert_eq!(place(&[OPEN_MPI]), ("Open MPI", 5, 1, 6));
        let pmi = [
            ("PMI_RANK", "1"),
            ("PMI_SIZE", "2"),
            ("MPI_LOCALRANKID", "1"),
        ];
        assert_eq!(place(&[&pmi]), ("PMI", 1, 1, 2));
        let kubernetes = [("JOB_COMPLETION_INDEX", "1"), (WORLD_SIZE, "2")];
        assert_eq!(place(&[&kubernetes]), ("Kubernetes", 1, 0, 2));
        assert_eq!(detect(&[COMMON]), Ok(None));
    }

    #[test]
    fn inner_launchers_count() {
        assert_eq!(place(&[TORCHRUN, SLURM]).0, "torchrun");
        assert_eq!(place(&[OPEN_MPI, SLURM]).0, "Open MPI");
        // A batch script has a Slurm rank, but is not one of several ranks.
        assert_eq!(detect(&[&SLURM[..3], COMMON]), Ok(None));
        let steps = [("SLURM_STEP_NUM_TASKS", "4")];
        assert_eq!(place(&[SLURM, &steps]), ("Slurm", 2, 0, 4));
    }

    #[test]
    fn the_agent_of_torchrun_holds_its_port() {
        let agent = [(AGENT_STORE, "True")];
        let found = detect(&[TORCHRUN, COMMON, &agent]).unwrap().unwrap();
        assert_eq!(found.port, 29501);
    }

    #[test]
    fn what_is_wrong_is_named() {
        let error = |sets: &[&[(&str, &str)]]| detect(sets).unwrap_err().to_string();
        for (index, name) in [MASTER_ADDR, MASTER_PORT, TOKEN].iter().enumerate() {
            let mut common = COMMON.to_vec();
            common.remove(index);
            let error = error(&[TORCHRUN, &common]);
            assert!(error.contains(name) && error.contains("not set"), "{error}");
        }
        let one = |name, value| vec![(name, value)];
        let cases = [
            (vec![(RANK, "0"), (LOCAL_RANK, "0")], WORLD_SIZE),
            (vec![(RANK, "0"), (WORLD_SIZE, "2")], LOCAL_RANK),
            (one(LOCAL_RANK, "0"), "variable RANK "),
            (vec![(RANK, "4"), (WORLD_SIZE, "4")], "less than WORLD_SIZE"),
            (vec![(RANK, "x"), (WORLD_SIZE, "4")], "\"x\""),
            (
                vec![(RANK, "0"), (WORLD_SIZE, "2"), (LOCAL_RANK, "1")],
                LOCAL_RANK,
            ),
            (
                [OPEN_MPI, &[("PMI_RANK", "4")]].concat(),
                "PMI_RANK is \"4\", but must be 5",
            ),
            ([OPEN_MPI, &[("PMI_SIZE", "4")]].concat(), "PMI_SIZE"),
            (
                vec![("PMI_RANK", "0"), ("PMI_SIZE", "2")],
                "MPI_LOCALRANKID",
            ),
            (one("JOB_COMPLETION_INDEX", "0"), WORLD_SIZE),
            ([TORCHRUN, &[(MASTER_PORT, "65536")]].concat(), MASTER_PORT),
            ([TORCHRUN, &[(TOKEN, "short")]].concat(), "5 bytes long"),
        ];
        for (variables, name) in cases {
            let error = error(&[COMMON, &variables]);
            assert!(error.contains(name), "{error}");
            assert!(!error.contains("0123456789"), "{error}");
        }
    }
}
