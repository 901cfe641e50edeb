//! Stores behind [`Objects`]: what is put comes back, what fails is tried again, and a page is never a
//! wrong one.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use nuthatch_remote::{OpenError, Remote, open};
use nuthatch_store::RecordLayout;
use nuthatch_store::disk::{Asked, PageName, RecordShape};
use nuthatch_store::remote::{ObjectError, Objects, RemoteTier};
use nuthatch_types::{PageKey, SystemClock, TokenId};
use opendal::Operator;
use opendal::layers::ChaosLayer;
use opendal::services::Fs;
use tempfile::TempDir;

const SHAPE: RecordShape = RecordShape {
    namespace: 3,
    page_len: 2,
    page_bytes: 5_000,
    part_bytes: 5_000,
    is_encrypted: false,
};

fn folder(path: &Path) -> String {
    format!("file://{}", path.display())
}

#[test]
fn what_is_put_comes_back() {
    let dir = TempDir::new().unwrap();
    let store = open(&folder(&dir.path().join("kv"))).unwrap();
    let mut target = [0; 8];
    assert!(matches!(store.get("a/b", &mut target), Err(ObjectError::Absent)));
    store.put("a/b", &[1, 2, 3]).unwrap();
    assert_eq!((store.get("a/b", &mut target[..3]).unwrap(), &target[..4]), (3, &[1, 2, 3, 0][..]));
    assert!(store.get("a/b", &mut target).unwrap() <= 3, "more than there is");
    store.put("a/b", &[9; 20]).unwrap();
    assert_eq!((store.get("a/b", &mut target).unwrap(), target), (8, [9; 8]));
    for bytes in [[4; 4], [5; 4]] {
        store.put_new("once", &bytes).unwrap();
        store.get("once", &mut target[..4]).unwrap();
        assert_eq!(target[..4], [4; 4]);
    }
}

#[test]
fn addresses_name_stores() {
    for good in [
        "s3://kv-pages/some/prefix?endpoint=http://127.0.0.1:9000&region=us-east-1",
        "gs://kv-pages/some/prefix",
        "gs://kv-pages?endpoint=http://127.0.0.1:4443&credentials=/etc/key.json",
        "gcs://kv-pages?anonymous=yes",
        "az://kv-pages/some/prefix?account=birds",
        "azblob://kv-pages?account=birds",
        "az://kv-pages?account=birds&endpoint=http://127.0.0.1:10000/birds",
        "redis://127.0.0.1:6379",
        "redis://127.0.0.1/3?prefix=kv&ttl=60",
        "valkey://user:p%40ssword@127.0.0.1",
    ] {
        let opened = open(good).map(|_| ());
        assert!(opened.is_ok(), "{good}: {opened:?}");
    }
    for bad in [
        "",
        "kv",
        "/var/kv",
        "ftp://host/kv",
        "s3://",
        "s3://kv-pages?acl=public",
        "gs://",
        "gs://kv-pages?acl=public",
        "az://",
        "az://kv-pages",
        "az://kv-pages?account=birds&key=x",
        "redis://",
        "redis://host/x",
        "redis://host?ttl=soon",
        "redis://host?ttl",
        "file://host/kv",
    ] {
        let opened = open(bad).map(|_| ());
        let is_named = matches!(
            opened,
            Err(OpenError::NoAddress(_) | OpenError::Missing { .. } | OpenError::Setting { .. })
        );
        assert!(is_named, "{bad}: {opened:?}");
    }
}

#[test]
fn nobody_answers() {
    // A port that is closed: an error, soon, and nothing worse.
    for address in [
        "redis://127.0.0.1:1",
        "gs://kv-pages?endpoint=http://127.0.0.1:1&credentials=/nowhere/at/all.json",
        "az://kv-pages?account=birds&endpoint=http://127.0.0.1:1/birds",
    ] {
        let store = open(address).unwrap();
        let found = store.get("a", &mut [0; 4]);
        assert!(matches!(found, Err(ObjectError::Failed(_))), "{address}: {found:?}");
    }
}

/// A third of all requests fail, and are tried again: most pages come, and those that come are right.
#[test]
fn in_chaos_pages_are_right_or_missing() {
    let dir = TempDir::new().unwrap();
    let root = dir.path().to_str().unwrap();
    let operator = Operator::new(Fs::default().root(root)).unwrap().layer(ChaosLayer::new(0.3));
    let store: Arc<dyn Objects> = Arc::new(Remote::over(operator).unwrap());
    let clock = Arc::new(SystemClock::start());
    let layout = RecordLayout::new(SHAPE, None, None);
    let mut tier = RemoteTier::start(store, layout, clock).unwrap();
    let key = |i: u32| PageKey(u128::from(i) << 64 | 5);
    let bytes = |i: u32| vec![i as u8; SHAPE.page_bytes];
    let mut n_come = 0;
    for i in 0..60 {
        let tokens = [TokenId(i), TokenId(2 * i)];
        let name = PageName { key: key(i), parent: key(i / 2), tokens: &tokens };
        let Some(mut buf) = tier.begin_save() else { continue };
        buf.page_mut().copy_from_slice(&bytes(i));
        tier.save(&name, buf);
        while tier.is_busy() {
            assert!(tier.poll().is_none());
            std::thread::sleep(Duration::from_millis(1));
        }
        if tier.read(u64::from(i), &name) != Asked::Begun {
            continue;
        }
        let loaded = loop {
            match tier.poll() {
                Some(loaded) => break loaded,
                None => std::thread::sleep(Duration::from_millis(1)),
            }
        };
        if let Ok(buf) = loaded.page {
            assert_eq!(buf.page(), bytes(i));
            tier.recycle(buf);
            n_come += 1;
        }
    }
    assert!(n_come > 30, "{n_come} of 60, {:?}", tier.counters());
}
