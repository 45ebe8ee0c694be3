//! Empty; see `Cargo.toml`.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
}
