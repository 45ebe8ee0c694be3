//! Tests the launcher with processes: small commands, and this test binary as a rank.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use nvfp4_parallel::launch::{Ended, Launch, Show};
use nvfp4_parallel::world::Settings;
use nvfp4_parallel::{BufferMut, Collective, Environment, Reduction, World};

/// Task of [`rank`] in a process of the launcher.
const TASK: &str = "NVFP4_TEST_TASK";

fn launch(processes: usize, command: Vec<OsString>) -> Launch {
    Launch {
        processes,
        command,
        show: Show::First,
        grace: Duration::from_secs(2),
    }
}

#[cfg(unix)]
fn shell(processes: usize, script: &str) -> (Ended, Duration) {
    let began = Instant::now();
    let command = ["sh", "-c", script].map(OsString::from).to_vec();
    let ended = launch(processes, command).run().unwrap();
    (ended, began.elapsed())
}

#[cfg(unix)]
fn folder(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = fs::remove_dir_all(&path);
    fs::create_dir_all(&path).unwrap();
    path
}

#[test]
#[cfg(unix)]
fn ranks_get_their_variables() {
    let folder = folder("variables");
    let script = format!(
        "test ${{#NVFP4_TOKEN}} = 64 && test -n \"$MASTER_PORT\" && echo \
         $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR > {}/$RANK",
        folder.display()
    );
    let (ended, _) = shell(3, &script);
    assert_eq!((ended.code, ended.problem), (0, None));
    for rank in 0..3 {
        let text = fs::read_to_string(folder.join(rank.to_string())).unwrap();
        assert_eq!(text.trim(), format!("{rank} {rank} 3 3 127.0.0.1"));
    }
}

#[test]
#[cfg(unix)]
fn a_rank_that_fails_ends_the_others() {
    // The others, and their child processes, would run for a minute.
    let (ended, took) = shell(
        3,
        "if test $RANK = 1; then echo what went wrong >&2; exit 7; fi; sleep 60 & wait",
    );
    assert_eq!(ended.code, 7);
    let problem = ended.problem.unwrap();
    for part in [
        "rank 1 failed",
        "7",
        "the run of 3 ranks",
        "[rank 1] what went wrong",
    ] {
        assert!(problem.contains(part), "{problem}");
    }
    assert!(took < Duration::from_secs(20), "{took:?}");
}

/// A rank that ignores SIGTERM is killed; the exit code is that of the rank that failed first.
#[test]
#[cfg(unix)]
fn a_rank_that_does_not_listen_is_killed() {
    let (ended, took) = shell(
        2,
        "if test $RANK = 1; then kill -9 $$; fi; trap '' TERM; sleep 60",
    );
    assert_eq!(ended.code, 128 + 9);
    assert!(ended.problem.unwrap().contains("rank 1 failed (signal: 9"));
    assert!(took < Duration::from_secs(20), "{took:?}");
}

#[test]
fn what_cannot_be_started() {
    let command = vec![OsString::from("a-program-that-is-not-there")];
    let error = launch(2, command).run().unwrap_err().to_string();
    assert!(
        error.contains("a-program-that-is-not-there") && error.contains("rank 0"),
        "{error}"
    );
    assert!(launch(0, vec!["true".into()]).run().is_err());
    assert!(launch(1, Vec::new()).run().is_err());
}

/// Starts this binary as ranks that run `task`. Their output goes to files: the output lines of a
/// nested test binary would be parsed as results of this one.
#[cfg(unix)]
fn ranks(processes: usize, task: &str, folder: &Path) -> (Ended, Duration) {
    let began = Instant::now();
    let script = r#"folder=$1; shift; exec "$@" > "$folder/$RANK.log" 2>&1"#;
    let mut command = ["sh", "-c", script, "sh"].map(OsString::from).to_vec();
    command.push(folder.into());
    command.push("env".into());
    command.push(format!("{TASK}={task}:{}", folder.display()).into());
    command.push(env::current_exe().unwrap().into());
    command.extend(["launch::rank", "--exact", "--nocapture"].map(OsString::from));
    let ended = launch(processes, command).run().unwrap();
    (ended, began.elapsed())
}

/// Not a test: the body of a process of the launcher. Without a task it does nothing.
#[test]
fn rank() {
    let Ok(task) = env::var(TASK) else { return };
    let (task, folder) = task.split_once(':').unwrap();
    let environment = Environment::detect().unwrap().unwrap();
    let rank = environment.rank;
    let settings = Settings {
        grace: Some(Duration::from_secs(1)),
        ..Settings::default()
    };
    let world = World::join(environment, settings).unwrap();
    let group = world.group().clone();
    for step in 0.. {
        let mut buffer = [rank as f32, 1.0];
        if let Err(error) = group.all_reduce(BufferMut::F32(&mut buffer), Reduction::Sum) {
            fs::write(Path::new(folder).join(rank.to_string()), error.to_string()).unwrap();
            // Like a program that prints its error and ends.
            panic!("{error}");
        }
        let size = group.size() as f32;
        assert_eq!(buffer, [size * (size - 1.0) / 2.0, size]);
        match (task, step) {
            ("train", 20) => break,
            #[cfg(unix)]
            ("die", 5) if rank == 1 => {
                // SAFETY: it is this process that ends.
                unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
            }
            ("stop", 5) if rank == 0 => loop {
                group.label("thinking");
                thread::sleep(Duration::from_millis(20));
                if world.failure().is_some() {
                    break;
                }
            },
            ("stop", 5) if rank == 1 => world.fail("no more data"),
            _ => {}
        }
    }
    world.leave().unwrap();
    fs::write(Path::new(folder).join(rank.to_string()), "done").unwrap();
}

#[cfg(unix)]
fn said(folder: &Path, rank: usize) -> String {
    fs::read_to_string(folder.join(rank.to_string())).unwrap()
}

#[test]
#[cfg(unix)]
fn processes_train_together() {
    let folder = folder("together");
    let (ended, _) = ranks(4, "train", &folder);
    assert_eq!((ended.code, ended.problem), (0, None));
    assert!((0..4).all(|rank| said(&folder, rank) == "done"));
}

/// All other ranks end by themselves, and report which rank died and during which call.
#[test]
#[cfg(unix)]
fn a_killed_rank_ends_the_run() {
    let folder = folder("killed");
    let (ended, took) = ranks(3, "die", &folder);
    assert_eq!(ended.code, 128 + 9);
    assert!(ended.problem.unwrap().contains("rank 1 failed (signal: 9"));
    assert!(took < Duration::from_secs(20), "{took:?}");
    for rank in [0, 2] {
        let text = said(&folder, rank);
        assert!(text.contains("rank 1"), "{text}");
    }
}

#[test]
#[cfg(unix)]
fn a_rank_that_gives_up_ends_the_run() {
    let folder = folder("gives-up");
    let (ended, took) = ranks(3, "stop", &folder);
    assert_ne!(ended.code, 0);
    assert!(took < Duration::from_secs(20), "{took:?}");
    for rank in 0..3 {
        let text = said(&folder, rank);
        assert!(
            text.contains("rank 1 failed: no more data"),
            "rank {rank}: {text}"
        );
    }
}
