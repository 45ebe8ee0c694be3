//! NVRTC and the disassembler, loaded at run time from a folder of CUDA tools: no GPU required.

use std::{
    ffi::{CStr, CString, c_char, c_int, c_void},
    path::{Path, PathBuf},
    process::Command,
    ptr::null_mut,
};

use libloading::{Library, Symbol};

/// The folder that `cargo xtask setup` fills, or the one in `NVFP4_CUDA_TOOLS`.
pub struct CudaTools {
    root: PathBuf,
    nvrtc: Library,
}

/// Machine code.
pub struct Compiled {
    /// Contents of the object file.
    pub code: Vec<u8>,
    /// Stack bytes per thread: spilled registers, and arrays with run-time indices.
    pub stack: usize,
    /// Registers per thread.
    pub registers: usize,
}

impl CudaTools {
    /// Returns the tools, or the reason why they are not available.
    pub fn find() -> Result<Self, String> {
        let root = match std::env::var_os("NVFP4_CUDA_TOOLS") {
            Some(root) => PathBuf::from(root),
            None => data_folder()
                .ok_or("no home folder")?
                .join("nvfp4/cuda-13.5"),
        };
        let path = root.join("lib/libnvrtc.so.13");
        if !path.exists() {
            return Err(format!(
                "no NVRTC in {}: run `cargo xtask setup`",
                root.display()
            ));
        }
        // SAFETY: loading NVRTC runs only its own initialisers.
        let nvrtc = unsafe { Library::new(&path) }.map_err(|error| error.to_string())?;
        Ok(Self { root, nvrtc })
    }

    /// Compiles CUDA C++ for `arch` (such as `sm_100a`) to machine code.
    ///
    /// # Errors
    /// Returns the compiler's log.
    pub fn compile(&self, source: &str, arch: &str) -> Result<Compiled, String> {
        type Program = *mut c_void;
        let source = CString::new(source).unwrap();
        let include = |folder: &str| {
            CString::new(format!(
                "--include-path={}",
                self.root.join(folder).display()
            ))
            .unwrap()
        };
        let options = [
            CString::new(format!("--gpu-architecture={arch}")).unwrap(),
            include("include"),
            include("include/cccl"),
            // Prints resource usage to the log; a compilation from NVRTC's cache lacks it.
            CString::new("--ptxas-options=-v").unwrap(),
            CString::new("--no-cache").unwrap(),
        ];
        let options: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        // SAFETY: the signatures are those of nvrtc.h, strings outlive the program, and each buffer
        // has the size that the library asked for.
        unsafe {
            let function = |name: &str| -> Symbol<*const c_void> {
                self.nvrtc
                    .get(name.as_bytes())
                    .unwrap_or_else(|error| panic!("{name}: {error}"))
            };
            macro_rules! nvrtc {
                ($name:literal, $($type:ty),*) => {
                    std::mem::transmute::<
                        *const c_void,
                        unsafe extern "C" fn($($type),*) -> c_int,
                    >(*function($name))
                };
            }
            let create = nvrtc!(
                "nvrtcCreateProgram",
                *mut Program,
                *const c_char,
                *const c_char,
                c_int,
                *const *const c_char,
                *const *const c_char
            );
            let compile = nvrtc!("nvrtcCompileProgram", Program, c_int, *const *const c_char);
            let log_size = nvrtc!("nvrtcGetProgramLogSize", Program, *mut usize);
            let log = nvrtc!("nvrtcGetProgramLog", Program, *mut c_char);
            let cubin_size = nvrtc!("nvrtcGetCUBINSize", Program, *mut usize);
            let cubin = nvrtc!("nvrtcGetCUBIN", Program, *mut c_char);
            let destroy = nvrtc!("nvrtcDestroyProgram", *mut Program);

            let mut program: Program = null_mut();
            let status = create(
                &mut program,
                source.as_ptr(),
                c"kernel.cu".as_ptr(),
                0,
                null_mut(),
                null_mut(),
            );
            assert_eq!(status, 0, "nvrtcCreateProgram");
            let status = compile(program, options.len() as c_int, options.as_ptr());
            let mut size = 0;
            assert_eq!(log_size(program, &mut size), 0, "nvrtcGetProgramLogSize");
            let mut text = vec![0u8; size.max(1)];
            assert_eq!(
                log(program, text.as_mut_ptr().cast()),
                0,
                "nvrtcGetProgramLog"
            );
            let text = CStr::from_bytes_until_nul(&text).unwrap().to_string_lossy();
            let result = if status == 0 {
                let mut size = 0;
                assert_eq!(cubin_size(program, &mut size), 0, "nvrtcGetCUBINSize");
                let mut code = vec![0u8; size];
                assert_eq!(cubin(program, code.as_mut_ptr().cast()), 0, "nvrtcGetCUBIN");
                // Warnings C7510 to C7520: every `wgmma` is waited for separately, against the
                // source.
                assert!(!text.contains("serialized"), "{text}");
                Ok(Compiled {
                    code,
                    stack: stack_of(&text),
                    registers: number_before(&text, " registers"),
                })
            } else {
                Err(text.into_owned())
            };
            destroy(&mut program);
            result
        }
    }

    /// Returns the machine code as text.
    pub fn disassemble(&self, code: &[u8], name: &str) -> String {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
        let file = folder.join(format!("{name}.cubin"));
        std::fs::write(&file, code).unwrap();
        let output = Command::new(self.root.join("bin/nvdisasm"))
            // Only the code, without the control-flow analysis, which takes half the time.
            .args(["-c", "-ndf"])
            .arg(&file)
            .output();
        let output = output.unwrap();
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        String::from_utf8(output.stdout).unwrap()
    }
}

/// Returns the stack of the kernel from ptxas's output: `16 bytes stack frame, ...`.
fn stack_of(log: &str) -> usize {
    let frames = log.matches(" bytes stack frame").count();
    assert_eq!(frames, 1, "one kernel: {log}");
    number_before(log, " bytes stack frame")
}

/// Returns the number before `what` in the log of ptxas.
fn number_before(log: &str, what: &str) -> usize {
    let numbers = log.match_indices(what).filter_map(|(at, _)| {
        let number = log[..at].rsplit(char::is_whitespace).next()?;
        number.parse().ok()
    });
    numbers.last().unwrap_or_else(|| panic!("{log}"))
}

fn data_folder() -> Option<PathBuf> {
    match std::env::var_os("XDG_DATA_HOME") {
        Some(folder) => Some(folder.into()),
        None => Some(PathBuf::from(std::env::var_os("HOME")?).join(".local/share")),
    }
}
