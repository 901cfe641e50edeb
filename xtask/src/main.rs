//! Chores, one entry point.

fn main() {}
