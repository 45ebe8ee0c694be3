//! Tests of several processes that train together, over TCP on this machine.

use std::fs;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Command, Output, Stdio};
#[cfg(target_os = "linux")]
use std::{
    thread,
    time::{Duration, Instant},
};

use crate::support::*;

/// No clipping, because sharding changes the summation order of the norm and thus the last bit.
const RECIPE: &str = "--recipe f32 --no-compare";

/// Returns the command for `ranks` ranks, or for one process.
fn train_command(ranks: usize) -> String {
    match ranks {
        1 => "train".into(),
        _ => format!("launch --gpus {ranks} -- train"),
    }
}

fn launch(ranks: usize, out: &Path, more: &str) -> Output {
    launch_sized(ranks, SMALL, out, more)
}

fn launch_sized(ranks: usize, sizes: &str, out: &Path, more: &str) -> Output {
    let out = out.to_str().unwrap();
    let more: Vec<&str> = more.split_whitespace().collect();
    nvfp4(
        &format!("{} {sizes} {RUN}", train_command(ranks)),
        &[&["--data", text(), "--out", out], &more[..]].concat(),
    )
}

fn resume(ranks: usize, out: &Path) -> Output {
    resume_on(ranks, out, "")
}

/// Resumes on another layout.
fn resume_on(ranks: usize, out: &Path, layout: &str) -> Output {
    let layout: Vec<&str> = layout.split_whitespace().collect();
    let resumed = ["--resume", out.to_str().unwrap()];
    nvfp4(&train_command(ranks), &[&resumed, &layout[..]].concat())
}

/// Returns the validation losses of a run with one recipe.
fn valid_losses(out: &Path, recipe: &str) -> Vec<f64> {
    let rows = metrics(&out.join(recipe).join("metrics.csv"));
    let losses = rows.iter().filter(|row| !row[3].is_empty());
    losses.map(|row| row[3].parse().unwrap()).collect()
}

fn assert_near(found: &[f64], expected: &[f64], within: f64) {
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        assert!(
            (found / expected - 1.0).abs() < within,
            "{found} is not {expected}"
        );
    }
}

/// Asserts that the checkpoint files of both runs are equal, and their rows except for the speed.
fn assert_same_files(left: &Path, right: &Path, recipe: &str) {
    let [left, right] = [left, right].map(|out| out.join(recipe));
    let names = |folder: &Path| {
        let files = fs::read_dir(checkpoint(folder)).unwrap();
        let mut names: Vec<_> = files.map(|file| file.unwrap().file_name()).collect();
        names.sort();
        names
    };
    assert_eq!(names(&left), names(&right));
    for name in names(&left) {
        let name = name.to_str().unwrap();
        if !matches!(name, "timing.json" | "manifest.json") {
            let read = |folder: &Path| fs::read(checkpoint(folder).join(name)).unwrap();
            assert!(read(&left) == read(&right), "{name} differs");
        }
    }
    let rows = |folder: &Path| {
        let mut rows = metrics(&folder.join("metrics.csv"));
        rows.iter_mut().for_each(|row| row[5].clear());
        rows
    };
    assert_eq!(rows(&left), rows(&right));
}

/// In high precision, the mean over shares of a batch is that of the batch, up to the order of
/// summation.
#[test]
fn ranks_train_as_one_process_does() {
    let [one, two, four] = ["ranks-1", "ranks-2", "ranks-4"].map(folder);
    succeeds(train(&one, &format!("{RUN} {RECIPE}")));
    let expected = valid_losses(&one, "f32");
    for (ranks, out) in [(2, two), (4, four)] {
        let said = succeeds(launch(ranks, &out, RECIPE));
        let found = valid_losses(&out, "f32");
        let summary = json(&out.join("summary.json"));
        let percent = summary["exposed_communication_percent"].as_f64().unwrap();
        assert!(percent > 0.0 && percent < 100.0, "{percent}");
        assert_eq!(summary["results"][0]["exposed_communication_steps"], 12);
        let line =
            format!("did not hide: {percent:.1} % of the time of a step (f32, measured in 12");
        assert!(said.contains(&line), "{said}");
        // Before the first step nothing differs: the ranks take the validation batches round-robin.
        assert_eq!(found[0], expected[0]);
        assert_near(&found, &expected, 2e-5);
        assert!(out.join("summary.json").exists());
        assert_eq!(json(&out.join("config.json"))["dp"], ranks);
    }
}

/// Sharding does not change the values, and any number of ranks can read the files.
#[test]
fn sharded_runs_are_whole_ones_and_resume_on_other_ranks() {
    let whole = folder("ranks-whole");
    succeeds(launch(2, &whole, RECIPE));
    let expected = valid_losses(&whole, "f32");
    for (flag, of_model) in [("--fsdp", true), ("--zero1", false)] {
        let out = folder(&format!("ranks{flag}"));
        let said = succeeds(launch(2, &out, &format!("{RECIPE} {flag} --stop-at 6")));
        assert!(said.contains("launch --gpus 2 -- train --resume"), "{said}");
        let files = checkpoint(&out.join("f32"));
        assert!(files.join("optimizer-1.bpk").exists());
        assert_eq!(files.join("model-1.bpk").exists(), of_model);
        assert_eq!(files.join("model.bpk").exists(), !of_model);
        // Each rank has half of almost everything.
        let size = |name: &str| fs::metadata(files.join(name)).unwrap().len();
        let of_whole = checkpoint(&whole.join("f32")).join("optimizer.bpk");
        let bytes = fs::metadata(of_whole).unwrap().len();
        assert!(size("optimizer-0.bpk") < bytes * 6 / 10);
        for ranks in [1, 4, 2] {
            let copy = folder(&format!("ranks{flag}-{ranks}"));
            copy_folder(&out, &copy);
            succeeds(resume(ranks, &copy));
            assert_near(&valid_losses(&copy, "f32"), &expected, 2e-5);
        }
    }
}

/// Both dispatch modes give the losses of one process, and a run can be resumed with the other
/// mode.
#[test]
fn experts_of_ranks_train_by_either_dispatch() {
    let [one, out] = ["one", "two"].map(|name| folder(&format!("ranks-dispatch-{name}")));
    let more = format!("{RECIPE} --experts 4");
    succeeds(launch_sized(1, SMALL, &one, &more));
    let expected = valid_losses(&one, "f32");
    let gathered = format!("{more} --ep 2 --ep-dispatch all-gather --stop-at 6");
    succeeds(launch_sized(2, SMALL, &out, &gathered));
    assert_eq!(json(&out.join("config.json"))["ep_dispatch"], "all-gather");
    for layout in ["", "--ep-dispatch all-to-all"] {
        let copy = folder(&format!("ranks-dispatch{layout}"));
        copy_folder(&out, &copy);
        succeeds(resume_on(2, &copy, layout));
        assert_near(&valid_losses(&copy, "f32"), &expected, 2e-5);
    }
}

/// Ranks with shards of the matrices, or with different experts, train like one process, and other
/// layouts read their checkpoints.
#[test]
fn parts_of_a_model_train_as_the_whole_and_resume_on_other_layouts() {
    let sizes = SMALL.replace("--hidden 48", "--hidden 64");
    for (flag, model) in [("tp", ""), ("ep", "--experts 4")] {
        let [one, out] = ["one", "two"].map(|name| folder(&format!("ranks-{flag}-{name}")));
        let more = format!("{RECIPE} {model}");
        succeeds(launch_sized(1, &sizes, &one, &more));
        let expected = valid_losses(&one, "f32");
        let split = format!("{more} --{flag} 2 --stop-at 6");
        let said = succeeds(launch_sized(2, &sizes, &out, &split));
        assert!(said.contains("launch --gpus 2 -- train --resume"), "{said}");
        let files = checkpoint(&out.join("f32"));
        for name in ["model-0", "model-1", "optimizer-0", "optimizer-1"] {
            assert!(files.join(format!("{name}.bpk")).exists(), "{name}");
        }
        let layout = json(&out.join("config.json"));
        let data_ranks = if flag == "tp" { 1 } else { 2 };
        assert_eq!(
            (&layout[flag], &layout["dp"]),
            (&2.into(), &data_ranks.into())
        );
        let is_two = format!("{flag} is 2");
        fails(resume_on(1, &out, ""), &[&is_two]);
        let whole = format!("--{flag} 1");
        for (ranks, layout) in [(1, &whole[..]), (2, ""), (4, "")] {
            let copy = folder(&format!("ranks-{flag}-{ranks}{layout}"));
            copy_folder(&out, &copy);
            succeeds(resume_on(ranks, &copy, layout));
            assert_near(&valid_losses(&copy, "f32"), &expected, 2e-5);
        }
        // Resumes a single-process run on several ranks.
        let copy = folder(&format!("ranks-{flag}-of-one"));
        succeeds(launch_sized(
            1,
            &sizes,
            &copy,
            &format!("{more} --stop-at 6"),
        ));
        succeeds(resume_on(2, &copy, &format!("--{flag} 2")));
        assert_near(&valid_losses(&copy, "f32"), &expected, 2e-5);
    }
}

fn copy_folder(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let target = to.join(path.file_name().unwrap());
        match path.is_dir() {
            true => copy_folder(&path, &target),
            false => drop(fs::copy(&path, &target).unwrap()),
        }
    }
}

/// In NVFP4, with separate random bits on each rank, a resumed run produces the same bytes.
#[test]
fn a_resumed_run_of_ranks_reaches_the_same_bytes() {
    let sizes = SMALL.replace("--hidden 48", "--hidden 64");
    // Tests of `nvfp4-lm` resume every layout, in one process. Without --full, one run of processes
    // for each way to divide the work.
    let mut flags = vec![
        (2, "--grad-reduce bf16"),
        (2, "--ep 2 --experts 4 --ep-dispatch all-to-all"),
        (2, "--zero1"),
        (4, "--tp 2 --fsdp"),
    ];
    if nvfp4_test_support::is_full() {
        flags.extend([
            (2, ""),
            (2, "--fsdp"),
            (2, "--tp 2"),
            (2, "--ep 2 --experts 4"),
            (4, "--ep 2 --experts 4 --zero1"),
        ]);
    }
    for (ranks, flag) in flags {
        let more = format!("--no-compare {flag}");
        let [whole, stopped] =
            ["whole", "stopped"].map(|name| folder(&format!("ranks-bytes{flag}-{name}")));
        succeeds(launch_sized(ranks, &sizes, &whole, &more));
        let more = format!("{more} --stop-at 5");
        succeeds(launch_sized(ranks, &sizes, &stopped, &more));
        succeeds(resume(ranks, &stopped));
        assert_same_files(&whole, &stopped, "nvidia");
    }
}

/// Returns the process of `rank`, which `launcher` started.
#[cfg(target_os = "linux")]
fn process_of(rank: &str, launcher: u32) -> String {
    let children = format!("/proc/{launcher}/task/{launcher}/children");
    let children = fs::read_to_string(children).unwrap();
    let variable = format!("RANK={rank}");
    let mut children = children.split_whitespace();
    let found = children.find(|child| {
        let environment = fs::read(format!("/proc/{child}/environ")).unwrap_or_default();
        let mut variables = environment.split(|byte| *byte == 0);
        variables.any(|text| text == variable.as_bytes())
    });
    found.expect("the rank runs").to_owned()
}

/// Killing a rank ends the run within seconds, and the run resumes from its checkpoint to the bytes
/// of an undisturbed run.
#[test]
#[cfg(target_os = "linux")]
fn a_run_whose_rank_is_killed_resumes() {
    let [whole, killed] = ["whole", "killed"].map(|name| folder(&format!("ranks-kill-{name}")));
    let start = |out: &Path| {
        let run = "--steps 100 --warmup 2 --log-every 10 --eval-every 100 --checkpoint-every 10";
        let mut command = command(
            &format!("launch --gpus 2 -- train {SMALL} {run} --no-compare --fsdp"),
            &["--data", text(), "--out", out.to_str().unwrap()],
        );
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().unwrap()
    };
    succeeds(start(&whole).wait_with_output().unwrap());
    let mut launcher = start(&killed);
    let metrics = killed.join("nvidia").join("metrics.csv");
    let has_checkpoint = || fs::read_to_string(&metrics).is_ok_and(|rows| rows.contains("\n20,"));
    while !has_checkpoint() {
        assert_eq!(launcher.try_wait().unwrap(), None);
        thread::sleep(Duration::from_millis(2));
    }
    let began = Instant::now();
    let kill = format!("kill -KILL -{}", process_of("1", launcher.id()));
    assert!(
        Command::new("sh")
            .args(["-c", &kill])
            .status()
            .unwrap()
            .success()
    );
    let ended = launcher.wait_with_output().unwrap();
    assert!(began.elapsed() < Duration::from_secs(30));
    assert_eq!(ended.status.code(), Some(128 + 9));
    fails(ended, &["rank 1 failed (signal: 9"]);
    succeeds(resume(2, &killed));
    assert_same_files(&whole, &killed, "nvidia");
}

/// Without the launcher, which ends the other ranks itself.
#[test]
fn other_ranks_end_when_the_first_cannot_write_events() {
    let folder = folder("ranks-events");
    let (out, events) = (folder.join("run"), folder.join("events"));
    fs::write(&events, "a file").unwrap();
    // The listener is dropped here, so that the first rank can have its port.
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr();
    let port = address.unwrap().port().to_string();
    let start = |rank: &str| {
        let mut command = command(
            &format!("train {SMALL} {RUN} {RECIPE}"),
            &[
                "--data",
                text(),
                "--out",
                out.to_str().unwrap(),
                "--tensorboard",
                events.to_str().unwrap(),
            ],
        );
        command.envs([
            ("RANK", rank),
            ("LOCAL_RANK", rank),
            ("WORLD_SIZE", "2"),
            ("MASTER_ADDR", "127.0.0.1"),
            ("MASTER_PORT", port.as_str()),
            ("NVFP4_TOKEN", "0123456789abcdef"),
        ]);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().unwrap()
    };
    let ranks = ["0", "1"].map(start);
    let [first, other] = ranks.map(|rank| rank.wait_with_output().unwrap());
    fails(first, &["tensorboard", "events"]);
    fails(other, &["rank 0 failed; its message says why"]);
}

#[test]
fn what_ranks_cannot_do_is_said() {
    let out = folder("ranks-refused");
    let refused = |ranks, more: &str, names: &[&str]| {
        fails(launch(ranks, &out, &format!("{RECIPE} {more}")), names);
        assert!(!out.join("config.json").exists());
    };
    refused(3, "", &["batch is 4", "number of ranks (3)"]);
    refused(2, "--dp 4", &["dp is 4", "2 ranks"]);
    refused(2, "--fsdp --optimizer muon", &["fsdp", "adamw"]);
    refused(3, "--tp 2", &["tp is 2", "3 ranks"]);
    refused(2, "--tp 2", &["tp is 2", "hidden is 48", "multiple of 32"]);
    refused(2, "--ep 2", &["ep is 2", "no experts"]);
    fails(
        nvfp4("launch --gpus 2 -- dev study --out nowhere study.json", &[]),
        &["nvfp4 dev study", "one process"],
    );
    let mut command = Command::new(env!("CARGO_BIN_EXE_nvfp4"));
    command.args(format!("launch --gpus 2 -- train {SMALL} {RUN} {RECIPE}").split_whitespace());
    command.args(["--data", text(), "--out", out.to_str().unwrap()]);
    // NCCL does not support CPUs.
    let with = |command: &mut Command, how| command.env("NVFP4_COLLECTIVES", how).output();
    for how in ["nccl", "nccl-overlap-tokens", "nccl-overlap"] {
        fails(
            with(&mut command, how).unwrap(),
            &["NCCL", "not a CUDA device"],
        );
    }
    fails(
        with(&mut command, "carrier").unwrap(),
        &["NVFP4_COLLECTIVES", "carrier", "host"],
    );
    fails(train(&out, "--dp 2"), &["dp is 2", "1 ranks"]);
    fails(train(&out, "--ep 2 --experts 4"), &["ep is 2", "1 ranks"]);
}
