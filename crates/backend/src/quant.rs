//! The quantised formats, defined by how one block becomes floats.
