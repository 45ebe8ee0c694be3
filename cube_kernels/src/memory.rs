//! Device memory: allocation, transfers, checks.

use bytemuck::AnyBitPattern;
use cubecl::{client::Client, ir::AddressType, server::Handle};

use crate::{Nvfp4Error, graph::hold_for_branch};

/// Returns the index width for kernels that address up to `elements` elements: 64 bits from 2^31
/// on.
pub(crate) fn address_type(elements: usize) -> AddressType {
    if elements > i32::MAX as usize {
        AddressType::U64
    } else {
        AddressType::U32
    }
}

/// Allocates `bytes` bytes, at least one, so that an empty tensor has a valid handle too.
pub(crate) fn allocate(client: &Client, bytes: usize) -> Handle {
    let memory = client.empty(bytes.max(1));
    hold_for_branch(&memory);
    memory
}

/// Copies `bytes` to the device.
pub(crate) fn upload(client: &Client, bytes: &[u8]) -> Handle {
    if bytes.is_empty() {
        allocate(client, 0)
    } else {
        client.create_from_slice(bytes)
    }
}

/// Returns the first `len` bytes of `handle`; waits for the device.
pub(crate) fn download(
    client: &Client,
    handle: &Handle,
    len: usize,
) -> Result<Vec<u8>, Nvfp4Error> {
    if len == 0 {
        return Ok(Vec::new());
    }
    let bytes = client
        .read_one(handle.clone())
        .map_err(|error| Nvfp4Error::Launch(format!("{error:?}")))?;
    match bytes.get(..len) {
        Some(bytes) => Ok(bytes.to_vec()),
        None => Err(Nvfp4Error::shape(
            "handle",
            format!("{} bytes of memory", bytes.len()),
            format!("at least {len}"),
        )),
    }
}

/// Returns the first `len` values of `handle`; waits for the device.
pub(crate) fn download_values<T: AnyBitPattern>(
    client: &Client,
    handle: &Handle,
    len: usize,
) -> Result<Vec<T>, Nvfp4Error> {
    let bytes = download(client, handle, len * size_of::<T>())?;
    let values = bytes.chunks_exact(size_of::<T>());
    Ok(values.map(bytemuck::pod_read_unaligned).collect())
}

/// True if 16-byte vectors may be loaded from the start of the buffer.
pub(crate) fn is_aligned(handle: &Handle) -> bool {
    handle.offset_start.unwrap_or(0).is_multiple_of(16)
}

pub(crate) fn check_memory(
    argument: &'static str,
    handle: &Handle,
    needed: usize,
) -> Result<(), Nvfp4Error> {
    let found = handle.size_in_used() as usize;
    if found < needed {
        return Err(Nvfp4Error::shape(
            argument,
            format!("{found} bytes of memory"),
            format!("at least {needed}"),
        ));
    }
    Ok(())
}
