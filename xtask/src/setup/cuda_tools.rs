//! NVRTC, the headers and the disassembler, for the test that compiles every kernel for Blackwell
//! on a machine without a GPU.
//!
//! The test looks in the folder that `NVFP4_CUDA_TOOLS` names, otherwise in
//! `<data folder of the user>/nvfp4/cuda-13.5`:
//!
//! ```text
//! lib/libnvrtc.so.13, lib/libnvrtc-builtins.so.13.5
//! bin/ptxas, bin/nvdisasm, bin/cuobjdump
//! include/                     CUDA's headers
//! include/cccl/                libcu++ (`<cuda/barrier>`): a second include path, as CubeCL passes it
//! .nvfp4-cuda-tools            the packages and versions it was made from
//! ```

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use super::pypi::{self, Download, Wheel};
use super::staging::Staging;

/// Names another folder of the same layout.
const VARIABLE: &str = "NVFP4_CUDA_TOOLS";
const FOLDER: &str = "nvfp4/cuda-13.5";
const SENTINEL: &str = ".nvfp4-cuda-tools";

/// CUDA 13.5; CCCL has its own version numbers, this is the one made for it.
const WHEELS: [Wheel; 7] = [
    Wheel {
        package: "nvidia-cuda-nvrtc",
        version: "13.5.37",
        file: "nvidia_cuda_nvrtc-13.5.37-py3-none-manylinux2010_x86_64.manylinux_2_12_x86_64.whl",
        sha256: "86b4d68058807988b7d9af5b44917a0601e9c337f35ccd657bfb3c759ff8d8bc",
    },
    Wheel {
        package: "nvidia-cuda-nvcc",
        version: "13.5.37",
        file: "nvidia_cuda_nvcc-13.5.37-py3-none-manylinux2014_x86_64.manylinux_2_17_x86_64.whl",
        sha256: "f5c4f7ead5d964fb4af42bbf1e6d3ec3c1e6e9d83b53749f691d387e7fcaa3a7",
    },
    Wheel {
        package: "nvidia-cuda-nvdisasm",
        version: "13.5.37",
        file: "nvidia_cuda_nvdisasm-13.5.37-py3-none-manylinux2014_x86_64.manylinux_2_17_x86_64.whl",
        sha256: "d3fdbdd49fa53e2e4aacd3db8259d052bd2b049ececdcb69e92e083c6728e7ca",
    },
    Wheel {
        package: "nvidia-cuda-cuobjdump",
        version: "13.5.37",
        file: "nvidia_cuda_cuobjdump-13.5.37-py3-none-manylinux2014_x86_64.manylinux_2_17_x86_64.whl",
        sha256: "38780fee50863252a0b8926357faa91615ca1c8346490563f33a06100cd73f58",
    },
    Wheel {
        package: "nvidia-cuda-runtime",
        version: "13.5.37",
        file: "nvidia_cuda_runtime-13.5.37-py3-none-manylinux2014_x86_64.manylinux_2_17_x86_64.whl",
        sha256: "df2b79a8852f10d1fef8c848489c49eebb5754051bf870202a862831412b179d",
    },
    Wheel {
        package: "nvidia-cuda-crt",
        version: "13.5.37",
        file: "nvidia_cuda_crt-13.5.37-py3-none-manylinux2014_x86_64.manylinux_2_17_x86_64.whl",
        sha256: "e898b7f73d3035fa89915a3f7bf3b54a73e90249746111aed295822c4729bb29",
    },
    Wheel {
        package: "nvidia-cuda-cccl",
        version: "13.3.5.0.6",
        file: "nvidia_cuda_cccl-13.3.5.0.6-py3-none-manylinux2014_x86_64.manylinux_2_17_x86_64.whl",
        sha256: "d5230098fa2df5021e1a00c0c4eee41797671a91119d31e892463e5ccf3ee326",
    },
];

/// What the test uses, and what must therefore be there.
const PROGRAMS: [&str; 3] = ["ptxas", "nvdisasm", "cuobjdump"];
const LIBRARIES: [&str; 2] = ["libnvrtc.so.13", "libnvrtc-builtins.so.13.5"];

/// Makes sure of the folder, or says that the test will be skipped.
pub fn ensure() -> Result<()> {
    if let Some(folder) = env::var_os(VARIABLE).map(PathBuf::from) {
        // Somebody else's folder: looked at, never written to.
        ensure!(
            PROGRAMS
                .iter()
                .all(|name| folder.join("bin").join(name).exists())
                && folder.join("include").is_dir()
                && has_nvrtc(&folder.join("lib")),
            "{VARIABLE} is {}, which does not have lib/libnvrtc.so*, include/ and bin/{{{}}}",
            folder.display(),
            PROGRAMS.join(",")
        );
        println!("CUDA compiler: {} ({VARIABLE})", folder.display());
        return Ok(());
    }
    let folder = dirs::data_local_dir()
        .context("this user has no data folder")?
        .join(FOLDER);
    if folder.join(SENTINEL).exists() {
        println!("CUDA compiler: already there ({})", folder.display());
        return Ok(());
    }
    let why = if cfg!(all(
        target_os = "linux",
        target_arch = "x86_64",
        target_env = "gnu"
    )) {
        println!("CUDA compiler: assembling {} from PyPI", folder.display());
        install(&folder)?
    } else {
        Some("the packages are for x86-64 Linux with glibc".to_owned())
    };
    match why {
        None => println!("CUDA compiler: installed in {}", folder.display()),
        Some(why) => println!(
            "CUDA compiler: not available, so the test that compiles the kernels for Blackwell will \
             report itself skipped\n{why}"
        ),
    }
    Ok(())
}

fn has_nvrtc(lib: &Path) -> bool {
    fs::read_dir(lib).is_ok_and(|entries| {
        entries
            .flatten()
            .any(|e| e.file_name().to_string_lossy().starts_with("libnvrtc.so"))
    })
}

/// Installs the tools; the reason why not where PyPI is out of reach.
fn install(folder: &Path) -> Result<Option<String>> {
    if let Err(error) = pypi::require_pip() {
        return Ok(Some(error.to_string()));
    }
    let staging = Staging::new(folder)?;
    let scratch = staging.scratch();
    if let Download::OutOfReach(why) = pypi::download(&WHEELS, &scratch)? {
        return Ok(Some(why));
    }
    for wheel in &WHEELS {
        pypi::unpack(&scratch.join(wheel.file), &scratch)?;
    }

    // All packages unpack into one CUDA tree; of its programs and libraries only these are kept.
    let tree = scratch.join("nvidia/cu13");
    let root = staging.root();
    for (part, files) in [("bin", &PROGRAMS[..]), ("lib", &LIBRARIES[..])] {
        fs::create_dir_all(root.join(part))?;
        for file in files {
            let (from, to) = (tree.join(part).join(file), root.join(part).join(file));
            fs::rename(&from, &to).with_context(|| format!("{}", from.display()))?;
            super::make_executable(&to)?;
        }
    }
    fs::rename(tree.join("include"), root.join("include")).context("include")?;

    let contents: String = WHEELS
        .iter()
        .map(|wheel| format!("{} {}\n", wheel.package, wheel.version))
        .collect();
    staging.publish(SENTINEL, &contents)?;
    Ok(None)
}
