//! Compiling kernels with NVRTC, and keeping the result on disk.

use std::ffi::{CStr, CString, c_char};
use std::path::{Path, PathBuf};

use cudarc::nvrtc::{result, sys};
use sha2::{Digest as _, Sha256};

use crate::error::{CompileError, OpenError};
use crate::program::Program;

/// Bytes of a hash at the start of a cached file.
const HASH_LEN: usize = 32;

/// A compiler for one architecture.
#[derive(Debug)]
pub(crate) struct Compiler {
    arch: String,
    version: (i32, i32),
    cache_dir: Option<PathBuf>,
}

impl Compiler {
    /// A compiler for `arch`, such as `sm_90a`, that keeps what it made in `cache_dir`.
    pub(crate) fn new(arch: String, cache_dir: Option<PathBuf>) -> Result<Self, OpenError> {
        #[expect(unsafe_code, reason = "looks whether the library is there")]
        // SAFETY: loads NVRTC, whose initialisers have no requirements.
        let is_present = unsafe { sys::is_culib_present() };
        if !is_present {
            return Err(OpenError::NoCompiler);
        }
        let mut version = (0, 0);
        #[expect(unsafe_code, reason = "a call of the C interface")]
        // SAFETY: both pointers are to live integers.
        let status = unsafe { sys::nvrtcVersion(&mut version.0, &mut version.1) };
        if status != sys::nvrtcResult::NVRTC_SUCCESS {
            return Err(OpenError::NoCompiler);
        }
        Ok(Compiler { arch, version, cache_dir })
    }

    /// The program's machine code: from the disk if it is there and whole, or else compiled.
    pub(crate) fn cubin(&self, program: &Program) -> Result<Vec<u8>, CompileError> {
        let path = self.cache_dir.as_deref().map(|dir| self.cache_path(dir, program));
        if let Some(cubin) = path.as_deref().and_then(read_checked) {
            return Ok(cubin);
        }
        let (cubin, _) = self.compile(program)?;
        self.keep(program, &cubin);
        Ok(cubin)
    }

    /// Keeps a program's machine code on disk.
    pub(crate) fn keep(&self, program: &Program, cubin: &[u8]) {
        if let Some(dir) = &self.cache_dir {
            // A cache that cannot be written costs time at the next start, and nothing else.
            let _ = write_checked(&self.cache_path(dir, program), cubin);
        }
    }

    /// Where the machine code of a program is kept: the name says everything that decides it.
    fn cache_path(&self, dir: &Path, program: &Program) -> PathBuf {
        let mut hash = Sha256::new();
        hash.update(program.source.as_bytes());
        hash.update([0]);
        hash.update(self.options().join("\n").as_bytes());
        hash.update(format!("\n{}.{}", self.version.0, self.version.1).as_bytes());
        let hash: String = hash.finalize()[..16].iter().map(|byte| format!("{byte:02x}")).collect();
        dir.join(format!("{}-{}-{hash}.cubin", program.name, self.arch))
    }

    fn options(&self) -> Vec<String> {
        let arch = format!("--gpu-architecture={}", self.arch);
        vec![arch, "--std=c++17".into(), "--ptxas-options=--verbose".into()]
    }

    /// Compiles, and gives the log besides.
    pub(crate) fn compile(&self, program: &Program) -> Result<(Vec<u8>, String), CompileError> {
        let error = |reason: String, log: String| {
            let (program, arch) = (program.name.clone(), self.arch.clone());
            CompileError { program, arch, reason, log }
        };
        let text = |e: result::NvrtcError| format!("{e:?}");
        let nul = |e: std::ffi::NulError| error(e.to_string(), String::new());
        let source = CString::new(program.source.as_str()).map_err(nul)?;
        let name = CString::new(format!("{}.cu", program.name)).map_err(nul)?;
        let created = result::create_program(&source, Some(&name));
        let handle = Handle(created.map_err(|e| error(text(e), String::new()))?);
        #[expect(unsafe_code, reason = "a call of the C interface")]
        // SAFETY: the handle is live until the end of this function.
        let compiled = unsafe { result::compile_program(handle.0, &self.options()) };
        let log = handle.log();
        compiled.map_err(|e| error(text(e), log.clone()))?;
        let cubin = handle.cubin().map_err(|e| error(text(e), log.clone()))?;
        Ok((cubin, log))
    }
}

/// A program inside NVRTC.
struct Handle(sys::nvrtcProgram);

impl Handle {
    fn log(&self) -> String {
        #[expect(unsafe_code, reason = "a call of the C interface")]
        // SAFETY: the handle is live.
        let log: Vec<c_char> = unsafe { result::get_program_log(self.0) }.unwrap_or_default();
        let bytes: Vec<u8> = log.iter().map(|&c| c.cast_unsigned()).collect();
        let log = CStr::from_bytes_until_nul(&bytes).map(CStr::to_string_lossy);
        log.unwrap_or_default().into_owned()
    }

    fn cubin(&self) -> Result<Vec<u8>, result::NvrtcError> {
        let mut size = 0;
        #[expect(unsafe_code, reason = "a call of the C interface")]
        // SAFETY: the handle is live and the pointer is to a live integer.
        unsafe { sys::nvrtcGetCUBINSize(self.0, &mut size) }.result()?;
        let mut cubin = vec![0u8; size];
        #[expect(unsafe_code, reason = "a call of the C interface")]
        // SAFETY: the handle is live, and the buffer has the size that NVRTC asked for.
        unsafe { sys::nvrtcGetCUBIN(self.0, cubin.as_mut_ptr().cast()) }.result()?;
        Ok(cubin)
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        #[expect(unsafe_code, reason = "a call of the C interface")]
        // SAFETY: the handle is live, and nobody has it after this.
        let destroyed = unsafe { result::destroy_program(self.0) };
        // What cannot be freed is lost; the program lives on.
        let _ = destroyed;
    }
}

/// The bytes of a cached file, if its hash is right.
fn read_checked(path: &Path) -> Option<Vec<u8>> {
    let mut bytes = std::fs::read(path).ok()?;
    if bytes.len() <= HASH_LEN {
        return None;
    }
    let cubin = bytes.split_off(HASH_LEN);
    (Sha256::digest(&cubin)[..] == bytes[..]).then_some(cubin)
}

/// Writes a cached file beside its place and moves it there, so that nobody reads half of it.
fn write_checked(path: &Path, cubin: &[u8]) -> std::io::Result<()> {
    let dir = path.parent().expect("the path was joined to a folder");
    std::fs::create_dir_all(dir)?;
    let own = path.with_extension(format!("{}.tmp", std::process::id()));
    let mut bytes = Sha256::digest(cubin).to_vec();
    bytes.extend_from_slice(cubin);
    std::fs::write(&own, bytes)?;
    std::fs::rename(&own, path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_damaged_file_is_not_used() {
        let dir = tempfile::TempDir::new().unwrap();
        let path = dir.path().join("deeper/a.cubin");
        assert_eq!(read_checked(&path), None);
        write_checked(&path, b"machine code").unwrap();
        assert_eq!(read_checked(&path).as_deref(), Some(&b"machine code"[..]));
        let whole = std::fs::read(&path).unwrap();
        for damaged in [&whole[1..], &whole[..whole.len() - 1], &whole[..5], &[]] {
            std::fs::write(&path, damaged).unwrap();
            assert_eq!(read_checked(&path), None);
        }
    }

    #[test]
    fn the_name_says_what_decides_the_code() {
        let compiler =
            |arch: &str, version| Compiler { arch: arch.into(), version, cache_dir: None };
        let program = |source: &str| Program { name: "a".into(), source: source.into() };
        let path =
            |compiler: &Compiler, source| compiler.cache_path(Path::new("d"), &program(source));
        let one = path(&compiler("sm_80", (13, 0)), "x");
        assert_eq!(one, path(&compiler("sm_80", (13, 0)), "x"));
        assert_ne!(one, path(&compiler("sm_80", (13, 0)), "y"));
        assert_ne!(one, path(&compiler("sm_90a", (13, 0)), "x"));
        assert_ne!(one, path(&compiler("sm_80", (13, 1)), "x"));
    }
}
