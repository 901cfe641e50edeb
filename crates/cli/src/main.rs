//! The binary `nuthatch`.

fn main() {}
