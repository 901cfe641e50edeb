//! How fast the disk tier writes and reads pages, by each engine: `disk_bench DIR [PAGES]`.
//!
//! Pages have the size of the default model's. Written to the end of the file system's own buffers, then
//! read with nothing of them in the system's page cache, and again with whatever it has by then.

#![expect(clippy::print_stdout, reason = "a program for people")]

use std::error::Error;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use nuthatch_store::RecordLayout;
use nuthatch_store::disk::{
    Asked, DiskDir, DiskTier, Files as _, PageName, PartChecks, RecordShape, SystemFiles,
};
use nuthatch_types::{Clock as _, PageKey, SystemClock, TokenId};

const SHAPE: RecordShape = RecordShape {
    namespace: 1,
    page_len: 16,
    page_bytes: 368_640,
    part_bytes: 49_152,
    is_encrypted: false,
};

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let dir = args.next().ok_or("the path of a directory is missing")?;
    let n_pages: u32 = args.next().map_or(Ok(1000), |text| text.parse())?;
    println!("MB/s of {n_pages} pages  write  read  read again  parts");
    for way in ["threads", "uring", "threads,direct", "uring,direct"] {
        let dir = Path::new(&dir).join(way);
        let files = Arc::new(SystemFiles::new(way.parse()?)?);
        let layout = RecordLayout::new(SHAPE, None, None);
        let clock = Arc::new(SystemClock::start());
        let watch = SystemClock::start();
        let mut tier = DiskTier::open(DiskDir::open(&dir)?, 64 << 30, &layout, files, clock)?;
        let begin = watch.now();
        for page in 0..n_pages {
            while !tier.may_save() {
                tier.wait(Duration::from_secs(1));
            }
            let Some(mut buf) = tier.begin_save() else { return Err("a write failed".into()) };
            buf.page_mut().fill(page as u8);
            with_name(page, |name| tier.save(name, buf));
        }
        while tier.is_busy() {
            tier.wait(Duration::from_secs(1));
        }
        drop_cache(&dir)?;
        let written = watch.now() - begin;
        let cold = read(&mut tier, n_pages, 1)?;
        let warm = read(&mut tier, n_pages, 1)?;
        drop_cache(&dir)?;
        let parts = read(&mut tier, n_pages, SHAPE.n_parts())?;
        let rate = |time: Duration| {
            f64::from(n_pages) * SHAPE.page_bytes as f64 / 1e6 / time.as_secs_f64()
        };
        let [written, cold, warm, parts] = [written, cold, warm, parts].map(rate);
        println!("{way:20} {written:8.0} {cold:6.0} {warm:6.0} {parts:6.0}");
        drop(tier);
        std::fs::remove_dir_all(&dir)?;
    }
    Ok(())
}

fn with_name<T>(page: u32, take: impl FnOnce(&PageName<'_>) -> T) -> T {
    let tokens = [TokenId(page); 16];
    let key =
        |n: u32| PageKey(u128::from(n).wrapping_mul(0x9E37_79B9_7F4A_7C15_F39C_C060_5CED_C835));
    take(&PageName { key: key(page + 1), parent: key(page), tokens: &tokens })
}

/// Reads all pages, whole or the first parts of all and then the next ones.
fn read(tier: &mut DiskTier, n_pages: u32, n_parts: usize) -> Result<Duration, Box<dyn Error>> {
    let watch = SystemClock::start();
    let mut checks = vec![None; n_pages as usize];
    let (mut n_asked, mut n_read, n_all) = (0, 0, n_pages as usize * n_parts);
    while n_read < n_all {
        while n_asked < n_all {
            let (part, page) = (n_asked / n_pages as usize, n_asked % n_pages as usize);
            let tag = n_asked as u64;
            let asked = with_name(page as u32, |name| match (n_parts, part, checks[page]) {
                (1, ..) => tier.read(tag, name),
                (_, 0, _) => tier.read_part(tag, name, (0, PartChecks::default())),
                (_, _, Some(checks)) => tier.read_part(tag, name, (part, checks)),
                (_, _, None) => Asked::Busy,
            });
            match asked {
                Asked::Begun => n_asked += 1,
                Asked::Busy => break,
                Asked::Missing => return Err("a page is missing".into()),
            }
        }
        let Some(loaded) = tier.wait(Duration::from_secs(1)) else { continue };
        let buf = loaded.page.map_err(|miss| format!("{miss:?}"))?;
        let page = loaded.tag as usize % n_pages as usize;
        if buf.page()[0] != page as u8 {
            return Err("another page came".into());
        }
        checks[page].get_or_insert(buf.checks());
        tier.recycle(buf);
        n_read += 1;
    }
    Ok(watch.now())
}

/// Writes the files out, and lets the system forget what it has of them.
fn drop_cache(dir: &Path) -> Result<(), Box<dyn Error>> {
    for (name, _) in SystemFiles::new("threads".parse()?)?.list(dir)? {
        let file = format!("of={}", dir.join(name).display());
        let words = ["oflag=nocache", "conv=notrunc,fdatasync", "count=0", "status=none"];
        Command::new("dd").arg(file).args(words).status()?;
    }
    Ok(())
}
