//! Objects somewhere else, and the secret that those share who use them.

use crate::disk::DiskError;

/// The object that holds the secret.
const SECRET: &str = "secret";

/// Objects somewhere else. An object is put whole or not at all, or its checks fail.
pub trait Objects: Send + Sync {
    /// Reads as much of an object's beginning as there is room for, and gives how much that was: less
    /// than that, or nothing, if the object is shorter.
    fn get(&self, name: &str, target: &mut [u8]) -> Result<usize, ObjectError>;
    /// Writes an object, instead of what was there.
    fn put(&self, name: &str, bytes: &[u8]) -> Result<(), ObjectError>;
    /// The same if nothing was there, as far as the store can promise that.
    fn put_new(&self, name: &str, bytes: &[u8]) -> Result<(), ObjectError>;
}

/// Why there is no object.
#[derive(Debug, thiserror::Error)]
pub enum ObjectError {
    /// It is not there.
    #[error("there is no such object")]
    Absent,
    /// The store did not answer, or said no.
    #[error("{0}")]
    Failed(String),
}

/// Something that only those know who may read the store, the same each time; made if there is none.
/// Names of pages are made with it.
pub fn secret(objects: &dyn Objects) -> Result<u128, DiskError> {
    let fail = |error: ObjectError| DiskError::Remote(error.to_string());
    let mut bytes = [0; 16];
    if !has_secret(objects, &mut bytes).map_err(fail)? {
        getrandom::fill(&mut bytes).map_err(|error| DiskError::Remote(error.to_string()))?;
        objects.put_new(SECRET, &bytes).map_err(fail)?;
        // Somebody else may have been faster.
        has_secret(objects, &mut bytes).map_err(fail)?;
    }
    Ok(u128::from_le_bytes(bytes))
}

fn has_secret(objects: &dyn Objects, bytes: &mut [u8; 16]) -> Result<bool, ObjectError> {
    match objects.get(SECRET, bytes) {
        Ok(16) => Ok(true),
        Ok(n) => Err(ObjectError::Failed(format!("{SECRET} has {n} bytes, not 16"))),
        Err(ObjectError::Absent) => Ok(false),
        Err(error) => Err(error),
    }
}
