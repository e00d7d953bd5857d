//! `--backend` and `cellar devices` where there is no driver, and with a driver that was made for
//! tests: an old one, one without a GPU, one whose GPU is small, one that takes no kernel. No
//! kernel runs here: crates/kv-gpu has a simulator for them.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails

use crate::support;

use std::path::Path;
use std::process::Command;
use std::sync::LazyLock;

use serde_json::Value;
use tempfile::TempDir;

/// A folder with a library that is none, under every name that a driver's could have: it hides
/// the drivers of this machine, if there are any.
static NO_DRIVER: LazyLock<TempDir> = LazyLock::new(|| {
    let folder = tempfile::tempdir().unwrap();
    for name in [
        "libcuda.so",
        "libcuda.so.1",
        "libnvcuda.so",
        "libnvcuda.so.1",
        "libOpenCL.so.1",
    ] {
        std::fs::write(folder.path().join(name), "no library").unwrap();
    }
    folder
});

/// A folder with the driver for tests.
static FAKE_DRIVER: LazyLock<TempDir> = LazyLock::new(|| {
    let folder = tempfile::tempdir().unwrap();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/support/fake_driver.cpp");
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned());
    let library = folder.path().join("libcuda.so");
    let built = Command::new(compiler)
        .args(["-shared", "-fPIC", "-O1", "-o"])
        .args([&library, &source])
        .status();
    assert!(built.unwrap().success(), "a C++ compiler makes the driver");
    std::fs::copy(&library, folder.path().join("libcuda.so.1")).unwrap();
    std::fs::write(folder.path().join("libOpenCL.so.1"), "no library").unwrap();
    folder
});

struct Ran {
    code: i32,
    stdout: String,
    stderr: String,
}

fn run_in(folder: &TempDir, settings: &[(&str, &str)], args: &[&str]) -> Ran {
    let mut command = support::cellar();
    command
        .env_remove("CUDA_VISIBLE_DEVICES")
        .env("LD_LIBRARY_PATH", folder.path());
    for (name, value) in settings {
        command.env(name, value);
    }
    let output = command.args(args).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    Ran {
        code: output.status.code().unwrap(),
        stdout: text(output.stdout),
        stderr: text(output.stderr),
    }
}

fn without_driver(args: &[&str]) -> Ran {
    run_in(&NO_DRIVER, &[], args)
}

fn with_driver(settings: &[(&str, &str)], args: &[&str]) -> Ran {
    run_in(&FAKE_DRIVER, settings, args)
}

fn json(ran: &Ran) -> Value {
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    serde_json::from_str(ran.stdout.lines().last().unwrap()).unwrap()
}

/// What `cellar devices --json` has of a backend.
fn of_backend(ran: &Ran, name: &str) -> Value {
    let rows = json(ran);
    let mut rows = rows.as_array().unwrap().iter();
    rows.find(|row| row["backend"] == name).unwrap().clone()
}

/// A folder with an OpenCL library for tests, which shows one GPU that lacks subgroups.
static FAKE_OPENCL: LazyLock<TempDir> = LazyLock::new(|| {
    let folder = tempfile::tempdir().unwrap();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/support/fake_opencl.cpp");
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned());
    let built = Command::new(compiler)
        .args(["-shared", "-fPIC", "-O1", "-o"])
        .args([&folder.path().join("libOpenCL.so.1"), &source])
        .status();
    assert!(built.unwrap().success(), "a C++ compiler makes the library");
    std::fs::write(folder.path().join("libcuda.so.1"), "no library").unwrap();
    std::fs::write(folder.path().join("libcuda.so"), "no library").unwrap();
    folder
});

const STORY: [&str; 9] = ["run", "-p", "Once", "-n", "6", "--temp", "0", "-c", "64"];
const NO_LIBRARY: &str = "no NVIDIA driver: libcuda.so.1 was not found";
const CUDA_IS_ABSENT: &str = "the cuda backend is not available: ";

fn story(more: &[&'static str]) -> Vec<&'static str> {
    [&STORY[..], more].concat()
}

#[test]
fn without_a_driver_the_cpu_computes_and_nobody_is_bothered() {
    let named = without_driver(&story(&["--backend", "cpu"]));
    let silent = without_driver(&story(&[]));
    assert_eq!((silent.code, &silent.stdout), (0, &named.stdout));
    for ran in [&silent, &named] {
        let lines = ran.stderr.lines().count();
        assert!(
            lines == 1 && ran.stderr.contains("| cpu ("),
            "{}",
            ran.stderr
        );
    }
    // Where auto is asked for, a line names the backend.
    let asked = without_driver(&story(&["--backend", "auto"]));
    assert_eq!((asked.code, &asked.stdout), (0, &named.stdout));
    let why = format!("backend: cpu; {CUDA_IS_ABSENT}{NO_LIBRARY}");
    assert_eq!(asked.stderr.lines().next(), Some(&*why));
    assert_eq!(asked.stderr.lines().count(), 2, "{}", asked.stderr);
}

#[test]
fn a_backend_that_is_not_there_is_refused_with_the_reason() {
    let model = support::model();
    let model = model.to_str().unwrap();
    let text = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
    let commands: [&[&str]; 6] = [
        &STORY,
        &["bench", "-m", model, "-p", "4", "-n", "2"],
        &["perplexity", "-m", model, "-c", "8", "-f", text],
        &["kl", "-m", model, "--kv-type", "q8_0", "One day"],
        &["logits", "-m", model, "--tokens", "1,2", "-o", "/dev/null"],
        &["embed", "-m", model, "--pooling", "mean", "One day"],
    ];
    for args in commands {
        let ran = without_driver(&[args, &["--backend", "cuda"]].concat());
        let wanted = format!(
            "error: {CUDA_IS_ABSENT}{NO_LIBRARY}; 'cellar devices' lists what there is; --backend cpu \
             needs no GPU\n"
        );
        assert_eq!((ran.code, &*ran.stderr), (1, &*wanted), "{args:?}");
        assert_eq!(ran.stdout, "");
    }
}

#[test]
fn devices_are_listed_and_those_that_are_absent_have_a_reason() {
    let ran = without_driver(&["devices", "--json"]);
    let cuda = of_backend(&ran, "cuda");
    assert_eq!(cuda["unavailable"], NO_LIBRARY);
    assert_eq!(cuda["devices"], Value::Array(Vec::new()));
    let opencl = of_backend(&ran, "opencl");
    let why = "no OpenCL driver: libOpenCL.so.1 was not found";
    assert_eq!(opencl["unavailable"], why);
    let cpu = of_backend(&ran, "cpu");
    assert!(
        cpu["devices"][0]["memory"].as_u64().unwrap() > 1 << 20,
        "{cpu}"
    );
    assert!(cpu.get("unavailable").is_none(), "{cpu}");
    let ran = without_driver(&["devices"]);
    let cuda = format!("cuda         not available: {NO_LIBRARY}");
    assert!(
        ran.stdout.lines().any(|line| line == cuda),
        "{}",
        ran.stdout
    );
    assert!(
        ran.stdout
            .lines()
            .any(|line| line.starts_with("cpu          "))
    );

    let ran = with_driver(&[], &["devices", "--json"]);
    let gpu = &of_backend(&ran, "cuda")["devices"][0];
    let name = "Fake GPU, compute capability 9.0, driver for CUDA 12.4";
    assert_eq!(
        (&gpu["name"], &gpu["memory"]),
        (&name.into(), &(16u64 << 30).into())
    );
    assert_eq!(gpu["free"], 8u64 << 30);
    // Of several, each has its own reason.
    let settings = [("FAKE_DEVICES", "2"), ("FAKE_MAJOR", "7")];
    let ran = with_driver(&settings, &["devices"]);
    let lines: Vec<&str> = ran
        .stdout
        .lines()
        .filter(|l| l.starts_with("cuda"))
        .collect();
    let old = "cuda         not available: Fake GPU has compute capability 7.0, and 8.0 or newer is needed";
    assert!(
        lines.len() == 2 && lines[0].contains("8.00 GiB of 16.00 GiB free"),
        "{lines:?}"
    );
    assert_eq!(lines[1], old);
}

#[test]
fn an_opencl_gpu_that_cannot_be_used_is_named() {
    let cases: [(&[(&str, &str)], &str); 5] = [
        (
            &[("FAKE_VERSION", "OpenCL 1.2 Fake")],
            "Fake GPU: it has 'OpenCL 1.2 Fake', and OpenCL 2.1 is needed",
        ),
        (
            &[("FAKE_EXTENSIONS", "cl_khr_fp16")],
            "Fake GPU: its driver has no cl_khr_subgroup_shuffle",
        ),
        (
            &[("FAKE_SVM", "0")],
            "Fake GPU: it has no shared virtual memory",
        ),
        (
            &[("FAKE_SUBGROUP", "16")],
            "Fake GPU: it has subgroups of [16], not of 32",
        ),
        (
            &[("FAKE_TYPE", "2")],
            "OpenCL shows no GPU, only 1 CPU (CELLAR_OPENCL_CPU=1 takes it, for tests)",
        ),
    ];
    for (settings, reason) in cases {
        let ran = run_in(&FAKE_OPENCL, settings, &story(&["--backend", "opencl"]));
        let wanted = format!("error: the opencl backend is not available: {reason}; ");
        assert!(ran.stderr.starts_with(&wanted), "{}", ran.stderr);
        assert_eq!(ran.code, 1);
    }
    // The driver's compiler refuses all kernels; what it says has the file of ours.
    let ran = run_in(&FAKE_OPENCL, &[], &["devices"]);
    let lines: Vec<&str> = ran
        .stdout
        .lines()
        .filter(|l| l.starts_with("opencl"))
        .collect();
    assert!(
        lines.len() == 1
            && lines[0]
                .contains("Fake GPU, OpenCL 3.0 Fake, driver 1.0, 16.00 GiB of 16.00 GiB free"),
        "{}",
        ran.stdout
    );
    let ran = run_in(&FAKE_OPENCL, &[], &story(&["--backend", "opencl"]));
    let wanted = "error: the opencl backend is not available: Fake GPU: the opencl backend failed: compiling \
                  kernel 'add': CL_BUILD_PROGRAM_FAILURE (dialect/opencl.h:2:1: error: unknown type name 'template'); ";
    assert!(ran.stderr.starts_with(wanted), "{}", ran.stderr);
    // Unasked, behind a driver of NVIDIA's that is not there, it is tried, and the CPU computes.
    let ran = run_in(&FAKE_OPENCL, &[], &STORY);
    assert!(
        ran.stderr
            .starts_with("backend: cpu; the opencl backend is not available: Fake GPU: "),
        "{}",
        ran.stderr
    );
    assert_eq!(ran.code, 0);
}

#[test]
fn a_driver_that_cannot_be_used_is_named() {
    let cases: [(&[(&str, &str)], &str); 6] = [
        (
            &[("FAKE_VERSION", "10020")],
            "the NVIDIA driver is too old: it knows CUDA 10.2, and 11.4 or newer is needed",
        ),
        (
            &[("FAKE_INIT", "999")],
            "the NVIDIA driver does not start: in other words (CUDA_ERROR_UNKNOWN)",
        ),
        (
            &[("FAKE_INIT", "802")],
            "the NVIDIA driver does not start: in other words (CUDA_ERROR_SYSTEM_NOT_READY); GPUs that \
             are joined by NVSwitch need the service nvidia-fabricmanager",
        ),
        (&[("FAKE_INIT", "100")], "the NVIDIA driver shows no GPU"),
        (&[("FAKE_DEVICES", "0")], "the NVIDIA driver shows no GPU"),
        (
            &[("FAKE_MAJOR", "7")],
            "Fake GPU has compute capability 7.0, and 8.0 or newer is needed",
        ),
    ];
    for (settings, reason) in cases {
        let ran = with_driver(settings, &story(&["--backend", "cuda"]));
        let wanted = format!("error: {CUDA_IS_ABSENT}{reason}; 'cellar devices'");
        assert_eq!(ran.code, 1);
        assert!(ran.stderr.starts_with(&wanted), "{}", ran.stderr);
        let ran = with_driver(settings, &story(&["--backend", "auto"]));
        let wanted = format!("backend: cpu; {CUDA_IS_ABSENT}{reason}");
        assert_eq!((ran.code, ran.stderr.lines().next()), (0, Some(&*wanted)));
    }
    // Unasked, a GPU that cannot be used is worth a line; a driver without a GPU is not.
    let old = with_driver(&[("FAKE_VERSION", "10020")], &STORY);
    assert!(old.stderr.starts_with("backend: cpu; "), "{}", old.stderr);
    let none = with_driver(&[("FAKE_INIT", "100")], &STORY);
    assert_eq!(none.stderr.lines().count(), 1, "{}", none.stderr);
}

#[test]
fn a_model_that_does_not_fit_the_gpu_is_computed_on_the_cpu() {
    // Nothing but what is kept free.
    let free = (256u64 << 20).to_string();
    let small = [("FAKE_FREE", &*free)];
    let ran = with_driver(&small, &STORY);
    let first = ran.stderr.lines().next().unwrap();
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert!(
        first.starts_with("backend: cpu; what the GPU computes of the model takes "),
        "{first}"
    );
    assert!(ran.stderr.contains("| cpu ("), "{}", ran.stderr);
    let ran = with_driver(&small, &story(&["--backend", "cuda"]));
    assert_eq!(ran.code, 1);
    let wanted = "no --ctx fits, a model of fewer bits per weight may; --backend cpu computes without \
                  the GPU (--no-memory-check tries anyway)";
    assert!(ran.stderr.contains(wanted), "{}", ran.stderr);
}

#[test]
fn the_largest_context_that_fits_the_gpu_does_and_one_more_token_does_not() {
    let plan = ["plan", "--backend", "cuda", "--json", "-c"];
    let total = |n_ctx: &str| {
        let ran = without_driver(&[&plan[..], &[n_ctx]].concat());
        let device = &json(&ran)["device"];
        let part = |name: &str| device[name].as_u64().unwrap();
        let parts = ["rows", "weights", "scratch", "transfers"].map(part);
        assert_eq!(parts.iter().sum::<u64>(), part("total"), "{device}");
        assert!(parts.iter().all(|&n| n > 0), "{device}");
        assert!(
            device["name"].is_null() && device["room"].is_null(),
            "{device}"
        );
        part("total")
    };
    let room = total("200");
    let free = (room + (256 << 20)).to_string();
    let settings = [("FAKE_FREE", &*free)];
    let ran = with_driver(&settings, &[&plan[..], &["256"]].concat());
    let device = &json(&ran)["device"];
    assert_eq!(device["room"], room);
    let largest = device["largest_n_ctx"].as_u64().unwrap();
    assert!((200..256).contains(&largest), "{largest}");
    assert!(total(&largest.to_string()) <= room && total(&(largest + 1).to_string()) > room);

    let ran = with_driver(
        &settings,
        &["run", "-p", "Once", "-c", "256", "--backend", "cuda"],
    );
    assert_eq!(ran.code, 1);
    let advice = format!("; --ctx {largest} is the largest that fits, --kv-type q8_0 takes less;");
    assert!(ran.stderr.contains(&advice), "{}", ran.stderr);
    let ran = with_driver(
        &settings,
        &["plan", "--backend", "auto", "--json", "-c", "200"],
    );
    assert_eq!(json(&ran)["backend_name"], "cuda");
    let ran = with_driver(
        &settings,
        &["plan", "--backend", "auto", "--json", "-c", "256"],
    );
    let device = &json(&ran)["device"];
    assert!(device["layers"]["last"].as_u64() < device["layers"]["of"].as_u64());
}

#[test]
fn a_gpu_computes_as_many_layers_as_fit() {
    let plan = ["plan", "--json", "-c", "64"];
    let planned = |n: &str| {
        json(&without_driver(
            &[&plan, &["--backend", "cuda", "-ngl", n][..]].concat(),
        ))
    };
    let one = planned("1");
    let n_layers = one["device"]["layers"]["of"].as_u64().unwrap();
    let plans: Vec<Value> = (1..n_layers).map(|n| planned(&n.to_string())).collect();
    for (fewer, more) in plans.iter().zip(&plans[1..]) {
        let (fewer_on, more_on) = (&fewer["device"], &more["device"]);
        for kind in ["rows", "weights", "total"] {
            assert!(
                fewer_on[kind].as_u64() < more_on[kind].as_u64(),
                "{kind}: {fewer} {more}"
            );
        }
        for kind in ["memory", "mapped"] {
            assert!(
                fewer[kind].as_u64() > more[kind].as_u64(),
                "{kind}: {fewer} {more}"
            );
        }
    }
    for n in ["-1", "999", &n_layers.to_string()] {
        assert_eq!(planned(n)["device"].get("layers"), None);
    }

    let room = plans[1]["device"]["total"].as_u64().unwrap();
    let free = (room + (256 << 20)).to_string();
    let settings = [("FAKE_FREE", &*free)];
    let auto = json(&with_driver(
        &settings,
        &[&plan, &["--backend", "auto"][..]].concat(),
    ));
    assert_eq!(auto["device"], {
        let mut device = plans[1]["device"].clone();
        for known in ["name", "room", "largest_n_ctx"] {
            device[known] = auto["device"][known].clone();
        }
        device
    });
    assert_eq!(auto["device"]["room"], room);
    for more in [&[][..], &["-ngl", "3"]] {
        let ran = with_driver(
            &settings,
            &[&story(&["--backend", "cuda"])[..], more].concat(),
        );
        assert_eq!(ran.code, 1);
        let advice = "--gpu-layers 2 leaves the layers before to the CPU;";
        assert!(ran.stderr.contains(advice), "{}", ran.stderr);
    }
    // Without a GPU there is nothing to share with.
    let ran = without_driver(&story(&["-ngl", "2"]));
    let why = format!("backend: cpu; {CUDA_IS_ABSENT}{NO_LIBRARY}");
    assert_eq!((ran.code, ran.stderr.lines().next()), (0, Some(&*why)));
}

#[test]
fn a_gpu_that_fails_at_loading_gives_way_unless_it_was_asked_for() {
    // The probe for the version of PTX loads, and no kernel after it.
    let broken = [("FAKE_MODULES", "1")];
    let named = without_driver(&story(&["--backend", "cpu"]));
    let ran = with_driver(&broken, &STORY);
    assert_eq!(
        (ran.code, &ran.stdout),
        (0, &named.stdout),
        "{}",
        ran.stderr
    );
    let mut lines = ran.stderr.lines();
    let taken = lines.next().unwrap();
    assert!(taken.starts_with("backend: cuda, Fake GPU, "), "{taken}");
    let why = lines.next().unwrap();
    let wanted = "backend: cpu; the cuda backend failed: loading kernel '";
    assert!(
        why.starts_with(wanted)
            && why.contains("(ptxas input, line 7; parsing error)")
            && why.contains("CUDA_ERROR_INVALID_PTX"),
        "{why}"
    );
    assert!(lines.next().unwrap().contains("| cpu ("));
    let ran = with_driver(&broken, &story(&["--backend", "cuda"]));
    assert_eq!(ran.code, 1);
    assert!(
        ran.stderr.starts_with("error: the cuda backend failed: "),
        "{}",
        ran.stderr
    );
}

#[test]
fn flags_of_the_cpu_keep_a_gpu_out() {
    let ran = with_driver(&[], &story(&["-ngl", "0"]));
    assert_eq!(ran.code, 0);
    assert!(ran.stderr.contains("| cpu (") && ran.stderr.lines().count() == 1);
    let ran = with_driver(&[], &story(&["-ngl", "0", "--backend", "cuda"]));
    assert_eq!(ran.code, 2);
    let ran = with_driver(
        &[],
        &[
            "bench",
            "--times",
            "-p",
            "4",
            "-n",
            "2",
            "--backend",
            "cuda",
        ],
    );
    assert_eq!(ran.code, 2, "{}", ran.stderr);
    assert!(ran.stderr.contains("--backend cpu does"), "{}", ran.stderr);
}
