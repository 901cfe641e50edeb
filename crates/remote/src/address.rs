//! The address of a store, and the operator behind it.

use std::time::Duration;

use opendal::Operator;
use opendal::services::{Azblob, Fs, Gcs, Redis, S3};
use percent_encoding::percent_decode_str;
use url::Url;

use crate::OpenError;

/// The operator for an address.
pub(crate) fn operator(address: &str) -> Result<Operator, OpenError> {
    let url = Url::parse(address).map_err(|_| OpenError::NoAddress(address.to_owned()))?;
    let operator = match url.scheme() {
        "s3" => Operator::new(s3(&url)?),
        "gs" | "gcs" => Operator::new(gcs(&url)?),
        "az" | "azblob" => Operator::new(azure(&url)?),
        "redis" | "rediss" | "valkey" | "valkeys" => Operator::new(redis(&url)?),
        "file" => Operator::new(file(&url)?),
        _ => return Err(OpenError::NoAddress(address.to_owned())),
    };
    operator.map_err(|error| OpenError::Refused(error.to_string()))
}

/// Credentials and what is not said come from where AWS's own tools have them.
fn s3(url: &Url) -> Result<S3, OpenError> {
    let bucket = host(url, "which bucket")?;
    let mut store = S3::default().bucket(bucket).root(url.path());
    let mut region = None;
    for (name, value) in url.query_pairs() {
        store = match &*name {
            "endpoint" => store.endpoint(&value),
            "region" => {
                region = Some(value.into_owned());
                store
            }
            _ => return Err(setting(&name, &value, "S3")),
        };
    }
    Ok(match region {
        Some(region) => store.region(&region),
        None => store,
    })
}

/// Credentials are found as Google's own tools find them.
fn gcs(url: &Url) -> Result<Gcs, OpenError> {
    let bucket = host(url, "which bucket")?;
    let mut store = Gcs::default().bucket(bucket).root(url.path());
    for (name, value) in url.query_pairs() {
        store = match (&*name, &*value) {
            ("endpoint", _) => store.endpoint(&value),
            ("credentials", _) => store.credential_path(&value),
            ("anonymous", "yes") => store.skip_signature(),
            _ => return Err(setting(&name, &value, "GCS")),
        };
    }
    Ok(store)
}

/// Keys and tokens are found as Azure's own tools find them.
fn azure(url: &Url) -> Result<Azblob, OpenError> {
    let container = host(url, "which container")?;
    let mut store = Azblob::default().container(container).root(url.path());
    let mut endpoint = None;
    for (name, value) in url.query_pairs() {
        match &*name {
            "endpoint" => endpoint = Some(value.into_owned()),
            "account" => {
                store = store.account_name(&value);
                let of_account = || format!("https://{value}.blob.core.windows.net");
                endpoint.get_or_insert_with(of_account);
            }
            _ => return Err(setting(&name, &value, "Azure")),
        }
    }
    let missing = || OpenError::Missing { address: url.to_string(), what: "which account" };
    Ok(store.endpoint(&endpoint.ok_or_else(missing)?))
}

fn redis(url: &Url) -> Result<Redis, OpenError> {
    let host = host(url, "which host")?;
    let scheme = if matches!(url.scheme(), "rediss" | "valkeys") { "rediss" } else { "redis" };
    let endpoint = format!("{scheme}://{host}:{}", url.port().unwrap_or(6379));
    let text = |text: &str| percent_decode_str(text).decode_utf8_lossy().into_owned();
    let password = text(url.password().unwrap_or_default());
    let store = Redis::default().endpoint(&endpoint).username(&text(url.username()));
    let mut store = store.password(&password).root("nuthatch");
    let database = url.path().trim_matches('/');
    if !database.is_empty() {
        let number = database.parse();
        store = store.db(number.map_err(|_| setting("database", database, "Redis"))?);
    }
    for (name, value) in url.query_pairs() {
        store = match (&*name, value.parse()) {
            ("prefix", _) => store.root(&value),
            ("ttl", Ok(seconds)) => store.default_ttl(Duration::from_secs(seconds)),
            _ => return Err(setting(&name, &value, "Redis")),
        };
    }
    Ok(store)
}

fn file(url: &Url) -> Result<Fs, OpenError> {
    let missing = || OpenError::Missing { address: url.to_string(), what: "which folder" };
    let path = url.to_file_path().map_err(|()| missing())?;
    let root = path.to_str().ok_or_else(missing)?;
    // Written beside and renamed, so that nobody sees half an object.
    Ok(Fs::default().root(root).atomic_write_dir(&format!("{root}/.unfinished")))
}

fn host<'a>(url: &'a Url, what: &'static str) -> Result<&'a str, OpenError> {
    let missing = || OpenError::Missing { address: url.to_string(), what };
    url.host_str().filter(|host| !host.is_empty()).ok_or_else(missing)
}

fn setting(name: &str, value: &str, scheme: &'static str) -> OpenError {
    OpenError::Setting { name: name.to_owned(), value: value.to_owned(), scheme }
}
