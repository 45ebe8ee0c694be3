//! Collectives over the memory of NVIDIA GPUs, by NCCL.
//!
//! The library is loaded at run time (`libnccl.so.2`, or the file that `NVFP4_NCCL` names) and
//! never linked. Its interface is declared with plain integers; numbers and meanings are those of
//! `nccl.h` (NCCL 2.10 and later, for bf16). cudarc's `nccl` (0.19.10) is not used: it panics if
//! the library or a function is missing, and does not look for `libnccl.so.2` or a given path.
//!
//! It has been run between the two GPUs of one machine (NVIDIA H100), not between machines. Tests
//! on a machine without the library cover the errors for a missing library and a missing function.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;

use libloading::Library;

use crate::activity::Activity;
use crate::buffer::{BufferMut, DType};
use crate::call::{Call, Operation};
use crate::collective::{Collective, HostGroup};
use crate::error::{ParallelError, Result};
use crate::reduction::Reduction;

/// Name of the variable with the path of the library.
pub const PATH: &str = "NVFP4_NCCL";
/// File names for the dynamic loader.
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];
/// Oldest supported version, the first with bf16.
const OLDEST: i32 = 21000;

type Status = c_int;
type Handle = *mut c_void;
/// `cudaStream_t`.
pub type Stream = *mut c_void;

/// `ncclSuccess`.
const SUCCESS: Status = 0;
/// `ncclInProgress`.
const IN_PROGRESS: Status = 7;

/// `ncclUniqueId`: shared by the ranks of a communicator.
#[derive(Clone, Copy)]
#[repr(C)]
struct UniqueId([u8; UniqueId::BYTES]);

impl UniqueId {
    /// `NCCL_UNIQUE_ID_BYTES`.
    const BYTES: usize = 128;

    /// Creates a new id; returns an error if the library is missing or finds no network.
    fn new() -> Result<Self> {
        let mut id = Self([0; Self::BYTES]);
        let interface = Interface::get()?;
        // SAFETY: the result is written to a local of the size of `ncclUniqueId`.
        let status = unsafe { (interface.unique_id)(&mut id) };
        interface.check("ncclGetUniqueId", status)?;
        Ok(id)
    }
}

/// Declares the loaded functions.
macro_rules! interface {
    ($($field:ident = $name:literal: fn($($argument:ty),*) $(-> $result:ty)?;)*) => {
        struct Interface {
            $($field: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
            /// Never unloaded.
            _library: Option<Library>,
        }

        impl Interface {
            /// Returns the functions of `library`, or the name of the first missing one.
            fn of(library: Library) -> std::result::Result<Self, String> {
                // SAFETY: the signatures are those of `nccl.h`, in which every enumeration has the
                // size of an int.
                unsafe {
                    Ok(Self {
                        $($field: *library
                            .get($name)
                            .map_err(|error| {
                                let name = String::from_utf8_lossy($name);
                                format!("it has no {name}: {error}")
                            })?,)*
                        _library: Some(library),
                    })
                }
            }

            /// An interface whose functions must not be called.
            #[cfg(test)]
            fn without_library() -> Self {
                extern "C" fn absent() {
                    unreachable!("a function of NCCL that the test has not replaced");
                }
                // SAFETY: function pointers are of one size; the function takes no argument and
                // never returns.
                unsafe {
                    Self {
                        $($field: std::mem::transmute::<
                            extern "C" fn(),
                            unsafe extern "C" fn($($argument),*) $(-> $result)?,
                        >(absent),)*
                        _library: None,
                    }
                }
            }
        }
    };
}

interface! {
    version = b"ncclGetVersion": fn(*mut c_int) -> Status;
    error_text = b"ncclGetErrorString": fn(Status) -> *const c_char;
    unique_id = b"ncclGetUniqueId": fn(*mut UniqueId) -> Status;
    init = b"ncclCommInitRank": fn(*mut Handle, c_int, UniqueId, c_int) -> Status;
    async_error = b"ncclCommGetAsyncError": fn(Handle, *mut Status) -> Status;
    all_reduce = b"ncclAllReduce":
        fn(*const c_void, *mut c_void, usize, c_int, c_int, Handle, Stream) -> Status;
    reduce_scatter = b"ncclReduceScatter":
        fn(*const c_void, *mut c_void, usize, c_int, c_int, Handle, Stream) -> Status;
    all_gather = b"ncclAllGather":
        fn(*const c_void, *mut c_void, usize, c_int, Handle, Stream) -> Status;
    broadcast = b"ncclBroadcast":
        fn(*const c_void, *mut c_void, usize, c_int, c_int, Handle, Stream) -> Status;
    send = b"ncclSend": fn(*const c_void, usize, c_int, c_int, Handle, Stream) -> Status;
    receive = b"ncclRecv": fn(*mut c_void, usize, c_int, c_int, Handle, Stream) -> Status;
    group_start = b"ncclGroupStart": fn() -> Status;
    group_end = b"ncclGroupEnd": fn() -> Status;
}

impl Interface {
    /// Returns the library of this process, loaded once.
    fn get() -> Result<&'static Self> {
        static INTERFACE: OnceLock<Result<Interface>> = OnceLock::new();
        let load = || match std::env::var_os(PATH) {
            Some(path) => Self::load(&[path.to_string_lossy().as_ref()]),
            None => Self::load(&NAMES),
        };
        INTERFACE.get_or_init(load).as_ref().map_err(Clone::clone)
    }

    /// Loads the first library that the loader finds under one of `names`.
    fn load(names: &[&str]) -> Result<Self> {
        let mut reasons = Vec::new();
        for name in names {
            // SAFETY: loading runs the library's initializers, which are NVIDIA's.
            match unsafe { Library::new(*name) } {
                Ok(library) => {
                    let interface = Self::of(library).map_err(|reason| missing(name, reason))?;
                    interface.check_version(name)?;
                    return Ok(interface);
                }
                Err(error) => reasons.push(error.to_string()),
            }
        }
        let reasons = reasons.join("; ");
        let reason = format!(
            "{reasons}; install NCCL 2.10 or later, or set {PATH} to the path of libnccl.so.2"
        );
        Err(missing(&names.join(", "), reason))
    }

    fn check_version(&self, name: &str) -> Result<()> {
        let mut version = 0;
        // SAFETY: the result is written to a local.
        let status = unsafe { (self.version)(&mut version) };
        self.check("ncclGetVersion", status)?;
        match version < OLDEST {
            true => Err(missing(
                name,
                format!("its version is {version}; bf16 needs {OLDEST}"),
            )),
            false => Ok(()),
        }
    }

    /// Converts a status to an error with the library's text.
    fn check(&self, operation: &str, status: Status) -> Result<()> {
        if status == SUCCESS {
            return Ok(());
        }
        // SAFETY: the library returns a constant string for every number.
        let text = unsafe { CStr::from_ptr((self.error_text)(status)) };
        Err(ParallelError::Library {
            library: "NCCL",
            operation: operation.into(),
            reason: format!("{} (status {status})", text.to_string_lossy()),
        })
    }
}

fn missing(names: &str, reason: String) -> ParallelError {
    ParallelError::Library {
        library: "NCCL",
        operation: format!("loading {names}"),
        reason,
    }
}

/// `ncclDataType_t`.
fn type_of(dtype: DType) -> c_int {
    match dtype {
        DType::U8 => 1,
        DType::U32 => 3,
        DType::F32 => 7,
        DType::Bf16 => 9,
    }
}

/// `ncclRedOp_t`.
fn reduction_of(reduction: Reduction) -> c_int {
    match reduction {
        Reduction::Sum => 0,
        Reduction::Max => 2,
        Reduction::Min => 3,
        Reduction::Avg => 4,
    }
}

/// Counts of elements of an all-to-all, whose parts are concatenated.
#[derive(Debug, Clone, Copy)]
pub struct Counts<'a> {
    /// Number of elements to each rank.
    pub send: &'a [usize],
    /// Number of elements from each rank.
    pub receive: &'a [usize],
}

/// Handle of a communicator. One thread queues operations. The watchdog polls for errors of
/// operations on the device, and ends the run at the first one.
///
/// Dropping it frees nothing: `ncclCommDestroy` waits for the other ranks, which may have ended, or
/// may wait for this one elsewhere. Its memory is freed when the process ends.
pub struct Communicator {
    interface: &'static Interface,
    handle: Handle,
    rank: usize,
    size: usize,
    activity: Activity,
}

/// Communicator for polling by the watchdog.
struct Watched {
    interface: &'static Interface,
    handle: Handle,
}

// SAFETY: `ncclCommGetAsyncError` may be called while another thread queues.
unsafe impl Send for Watched {}

impl Watched {
    /// Returns the error of an operation that was queued earlier: another rank is gone, the network
    /// or the device has failed.
    fn check(&self) -> Result<()> {
        let mut state = SUCCESS;
        // SAFETY: the result is written to a local; communicators are never freed.
        let status = unsafe { (self.interface.async_error)(self.handle, &mut state) };
        self.interface.check("ncclCommGetAsyncError", status)?;
        match state {
            IN_PROGRESS => Ok(()),
            state => self.interface.check("an operation of NCCL", state),
        }
    }
}

// SAFETY: NCCL allows calls from any thread, one at a time for a communicator; queueing takes
// `&mut self`.
unsafe impl Send for Communicator {}

impl Communicator {
    /// Creates the communicator of the ranks of `group`, for the device of the current context. All
    /// ranks call it and wait for each other; the watchdog notices a missing rank. Rank 0 creates
    /// the id and broadcasts it over `group`.
    ///
    /// # Errors
    /// Returns an error if the library is missing or fails, or the group fails.
    pub fn new(group: &HostGroup) -> Result<Self> {
        let (rank, size) = (group.rank(), group.size());
        let interface = Interface::get()?;
        let mut id = UniqueId([0; UniqueId::BYTES]);
        if rank == 0 {
            id = UniqueId::new()?;
        }
        group.broadcast(BufferMut::U8(&mut id.0), 0)?;
        let activity = group.activity().clone();
        let inside = activity.enter("ncclCommInitRank".into());
        let mut handle = std::ptr::null_mut();
        // SAFETY: the result is written to a local.
        let status = unsafe { (interface.init)(&mut handle, size as c_int, id, rank as c_int) };
        interface.check("ncclCommInitRank", status)?;
        drop(inside);
        let watched = Watched { interface, handle };
        activity.watch(move || watched.check());
        Ok(Self {
            interface,
            handle,
            rank,
            size,
            activity,
        })
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Number of ranks.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Queues `call` on `stream`, from the device address `input` to `output`. The two may be equal
    /// for all-reduce and broadcast. For all-gather and reduce-scatter the smaller buffer may be
    /// this rank's shard of the larger one.
    ///
    /// # Safety
    /// The current context must be that of the communicator's device, and `stream` one of its
    /// streams. The addresses must be those of device memory of the size that `call` requires (all
    /// ranks' shards for the input of a reduce-scatter and the output of an all-gather). The memory
    /// must stay alive, and must not be written by others, until the stream has passed the
    /// operation.
    ///
    /// # Errors
    /// Returns an error if `call` is not a collective of equal parts, a rank or reduction is out of
    /// range, or the library returns an error.
    pub unsafe fn queue(
        &mut self,
        call: &Call,
        input: u64,
        output: u64,
        stream: Stream,
    ) -> Result<()> {
        let _inside = self.activity.queue(call.to_string());
        let (dtype, handle) = (type_of(call.dtype), self.handle);
        let (from, to) = (input as *const c_void, output as *mut c_void);
        let library = self.interface;
        let supported = |reduction: Reduction| match call.dtype.supports(reduction) {
            true => Ok(reduction_of(reduction)),
            false => Err(self.refuse(call, "reduction", reduction.to_string())),
        };
        // SAFETY: the caller's promise.
        let (name, status) = match call.operation {
            Operation::AllReduce(reduction) => {
                let op = supported(reduction)?;
                ("ncclAllReduce", unsafe {
                    (library.all_reduce)(from, to, call.count, dtype, op, handle, stream)
                })
            }
            Operation::ReduceScatter(reduction) => {
                let op = supported(reduction)?;
                ("ncclReduceScatter", unsafe {
                    (library.reduce_scatter)(from, to, call.count, dtype, op, handle, stream)
                })
            }
            Operation::AllGather => ("ncclAllGather", unsafe {
                (library.all_gather)(from, to, call.count, dtype, handle, stream)
            }),
            Operation::Broadcast { root } => {
                if root >= self.size {
                    return Err(self.refuse(call, "root", root.to_string()));
                }
                let root = root as c_int;
                ("ncclBroadcast", unsafe {
                    (library.broadcast)(from, to, call.count, dtype, root, handle, stream)
                })
            }
            Operation::Send { .. } | Operation::AllToAll | Operation::Barrier => {
                let found = call.operation;
                return Err(self.refuse(call, "operation", format!("{found:?}")));
            }
        };
        library.check(name, status)
    }

    /// Queues several calls like [`queue`](Self::queue) in one NCCL group, which NCCL combines into
    /// few kernels. Each call has an input address and an output address.
    ///
    /// # Safety
    /// Same as [`queue`](Self::queue).
    ///
    /// # Errors
    /// Same as [`queue`](Self::queue); the calls before the failing one are queued.
    pub unsafe fn queue_all(&mut self, calls: &[(Call, [u64; 2])], stream: Stream) -> Result<()> {
        self.grouped(|own| {
            calls.iter().try_for_each(|(call, [input, output])| {
                // SAFETY: the caller's promise.
                unsafe { own.queue(call, *input, *output, stream) }
            })
        })
    }

    /// Queues the operations of `queue` in one NCCL group.
    fn grouped(&mut self, queue: impl FnOnce(&mut Self) -> Result<()>) -> Result<()> {
        let library = self.interface;
        // SAFETY: no memory is passed.
        library.check("ncclGroupStart", unsafe { (library.group_start)() })?;
        let queued = queue(self);
        // A group that was begun must be ended, also after an error.
        // SAFETY: no memory is passed.
        let ended = library.check("ncclGroupEnd", unsafe { (library.group_end)() });
        queued.and(ended)
    }

    /// Queues sends to all ranks and receives from them as one group; counts of zero are omitted.
    /// For a send to a single rank, only one count is nonzero.
    ///
    /// # Safety
    /// Same as [`queue`](Self::queue), with memory for all counts.
    ///
    /// # Errors
    /// Returns an error if the number of counts differs from the number of ranks, or the library
    /// returns an error.
    pub unsafe fn all_to_all(
        &mut self,
        dtype: DType,
        counts: Counts<'_>,
        [input, output]: [u64; 2],
        stream: Stream,
    ) -> Result<()> {
        let call = Call {
            operation: Operation::AllToAll,
            dtype,
            count: 0,
        };
        let _inside = self.activity.queue(call.to_string());
        for (argument, list) in [("send", counts.send), ("receive", counts.receive)] {
            if list.len() != self.size {
                return Err(self.refuse(&call, argument, format!("{} counts", list.len())));
            }
        }
        let number = type_of(dtype);
        let (mut from, mut to) = (input, output);
        self.grouped(|own| {
            let (library, handle) = (own.interface, own.handle);
            for peer in 0..own.size {
                let (sent, received) = (counts.send[peer], counts.receive[peer]);
                let peer = peer as c_int;
                if sent > 0 {
                    // SAFETY: the caller's promise.
                    let status = unsafe {
                        (library.send)(from as *const c_void, sent, number, peer, handle, stream)
                    };
                    library.check("ncclSend", status)?;
                }
                if received > 0 {
                    // SAFETY: the caller's promise.
                    let status = unsafe {
                        (library.receive)(to as *mut c_void, received, number, peer, handle, stream)
                    };
                    library.check("ncclRecv", status)?;
                }
                from += (sent * dtype.size()) as u64;
                to += (received * dtype.size()) as u64;
            }
            Ok(())
        })
    }

    fn refuse(&self, call: &Call, argument: &'static str, found: String) -> ParallelError {
        let expected = match argument {
            "reduction" => "sum, max or min of integers".into(),
            "root" => format!("less than {}", self.size),
            "operation" => "a collective of equal parts".into(),
            _ => format!("{} counts, one for each rank", self.size),
        };
        ParallelError::Call {
            rank: self.rank,
            call: call.to_string(),
            argument,
            found,
            expected,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_not_there() {
        let error = Interface::load(&["libnccl-that-is-not-there.so"])
            .err()
            .unwrap();
        let text = error.to_string();
        for part in ["NCCL", "libnccl-that-is-not-there.so", PATH] {
            assert!(text.contains(part), "{text}");
        }
    }

    /// Another library has none of the functions; the error names the first one.
    #[test]
    #[cfg(target_os = "linux")]
    fn a_library_without_the_functions() {
        let error = Interface::load(&["libc.so.6"]).err().unwrap().to_string();
        assert!(error.contains("it has no ncclGetVersion"), "{error}");
        assert!(error.contains("libc.so.6"), "{error}");
    }
    /// An error that NCCL reports after an operation was queued ends the run: the watchdog's probe
    /// returns it in the library's words.
    #[test]
    fn errors_of_the_device_are_seen() {
        const REMOTE_ERROR: Status = 6;
        extern "C" fn text(status: Status) -> *const c_char {
            match status {
                REMOTE_ERROR => c"remote process exited or there was a network error".as_ptr(),
                _ => c"another error".as_ptr(),
            }
        }
        // The handle is the state that the library would report.
        unsafe extern "C" fn state(handle: Handle, state: *mut Status) -> Status {
            // SAFETY: the test passes a local as the handle.
            unsafe { *state = *handle.cast::<Status>() };
            SUCCESS
        }
        let interface = Interface {
            error_text: text,
            async_error: state,
            ..Interface::without_library()
        };
        let interface = Box::leak(Box::new(interface));
        let activity = Activity::new();
        let reported = Box::leak(Box::new(SUCCESS));
        let handle: Handle = std::ptr::from_mut(reported).cast();
        let watched = Watched { interface, handle };
        activity.watch(move || watched.check());
        let report = |status: Status| {
            // SAFETY: the probe reads it on this thread.
            unsafe { *handle.cast::<Status>() = status };
            activity.probe()
        };
        assert_eq!(report(SUCCESS), Ok(()));
        assert_eq!(report(IN_PROGRESS), Ok(()));
        let error = report(REMOTE_ERROR).unwrap_err().to_string();
        assert!(error.contains("an operation of NCCL"), "{error}");
        assert!(error.contains("remote process exited"), "{error}");
    }
}
