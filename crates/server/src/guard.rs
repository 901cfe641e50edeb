//! Who may ask, and who pays.

use std::hash::Hasher as _;

use axum::http::{HeaderMap, header};
use nuthatch_engine::Tenant;
use nuthatch_wire::{ApiError, ErrorKind};
use siphasher::sip::SipHasher13;
use subtle::{Choice, ConstantTimeEq as _};

use crate::ServerConfig;

/// Names a tenant where there are no keys.
const TENANT_HEADER: &str = "x-tenant-id";

/// Who may ask.
pub(crate) struct Keys {
    api: Vec<String>,
    admin: Option<String>,
}

impl Keys {
    pub(crate) fn new(config: &ServerConfig) -> Self {
        Keys { api: config.api_keys.clone(), admin: config.admin_key.clone() }
    }

    /// Lets a client in that gives one of the keys, and says who it is.
    pub(crate) fn admit(&self, headers: &HeaderMap) -> Result<Tenant, ApiError> {
        if self.api.is_empty() {
            let header = headers.get(TENANT_HEADER);
            return Ok(header.map_or_else(Tenant::default, |value| tenant(value.as_bytes())));
        }
        let given = given(headers).ok_or_else(|| denied("an API key is needed"))?;
        match find(&self.api, given).or_else(|| find(self.admin.as_slice(), given)) {
            Some(key) => Ok(tenant(key.as_bytes())),
            None => Err(denied("the API key is wrong")),
        }
    }

    /// Lets a client in that gives the key for changes.
    pub(crate) fn admit_admin(&self, headers: &HeaderMap) -> Result<(), ApiError> {
        let admin = self.admin.as_slice();
        if admin.is_empty() {
            return Err(denied("the server has no admin key, so nobody may do this"));
        }
        let found = given(headers).and_then(|given| find(admin, given));
        found.map(drop).ok_or_else(|| denied("the admin key is needed"))
    }
}

impl std::fmt::Debug for Keys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Keys are never printed.
        write!(f, "Keys({})", self.api.len())
    }
}

/// The key that a client gives, as OpenAI's clients or Anthropic's do.
fn given(headers: &HeaderMap) -> Option<&[u8]> {
    let bearer = headers.get(header::AUTHORIZATION).and_then(|value| {
        let value = value.as_bytes();
        let (scheme, key) = value.split_at_checked("bearer ".len())?;
        scheme.eq_ignore_ascii_case(b"bearer ").then(|| key.trim_ascii())
    });
    bearer.or_else(|| headers.get("x-api-key").map(|value| value.as_bytes()))
}

/// The key that is given. Takes the same time whichever it is, and however much of it is right.
fn find<'a>(keys: &'a [String], given: &[u8]) -> Option<&'a String> {
    let mut found = None;
    for key in keys {
        let is_equal: Choice = key.as_bytes().ct_eq(given);
        if bool::from(is_equal) {
            found = Some(key);
        }
    }
    found
}

fn tenant(name: &[u8]) -> Tenant {
    // Folders of sessions and names of pages on disks are made of it, so it must never change; the
    // standard library's hasher may.
    let mut hasher = SipHasher13::new();
    hasher.write(&(name.len() as u64).to_le_bytes());
    hasher.write(name);
    Tenant(hasher.finish())
}

fn denied(message: &str) -> ApiError {
    ApiError::new(ErrorKind::Unauthorized, message).with_code("invalid_api_key")
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        pairs
            .iter()
            .map(|&(name, value)| {
                (header::HeaderName::from_static(name), HeaderValue::from_static(value))
            })
            .collect()
    }

    #[test]
    fn keys_open_what_they_should() {
        let keys = Keys { api: vec!["one".into(), "two".into()], admin: Some("root".into()) };
        let admit = |pairs: &[(&'static str, &'static str)]| keys.admit(&headers(pairs));
        let one = admit(&[("authorization", "Bearer one")]).unwrap();
        assert_eq!(admit(&[("authorization", "bearer  one ")]), Ok(one));
        assert_eq!(admit(&[("x-api-key", "one")]), Ok(one));
        assert_ne!(admit(&[("authorization", "Bearer two")]), Ok(one));
        assert!(admit(&[("authorization", "Bearer root")]).is_ok());
        // A tenant that a client makes up does not count beside its key.
        assert_eq!(admit(&[("authorization", "Bearer one"), ("x-tenant-id", "x")]), Ok(one));
        let pairs: [&[_]; 5] = [
            &[],
            &[("authorization", "one")],
            &[("authorization", "Bearer on")],
            &[("authorization", "Bearer one2")],
            &[("authorization", "Bearer ")],
        ];
        for pairs in pairs {
            assert!(admit(pairs).is_err(), "{pairs:?}");
        }
        assert!(keys.admit_admin(&headers(&[("authorization", "Bearer one")])).is_err());
        assert!(keys.admit_admin(&headers(&[("authorization", "Bearer root")])).is_ok());
    }

    #[test]
    fn without_keys_everybody_may_ask_and_nobody_may_change() {
        let keys = Keys { api: Vec::new(), admin: None };
        assert_eq!(keys.admit(&headers(&[])), Ok(Tenant::default()));
        let tenant = |name| keys.admit(&headers(&[("x-tenant-id", name)])).unwrap();
        assert_eq!(tenant("a"), tenant("a"));
        assert_ne!(tenant("a"), tenant("b"));
        assert_eq!(
            tenant("a"),
            Tenant(0xbeb9_a6bb_f61b_58b4),
            "as it was when sessions were saved"
        );
        assert!(keys.admit_admin(&headers(&[("authorization", "Bearer ")])).is_err());
    }
}
