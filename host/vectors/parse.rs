//! Reads the two formats that the vectors come in: `Name = hex` lines (CAVP and its imitators) and Wycheproof's JSON.

use super::check::{Kind, Vector};
use crate::{Error, Result};

/// AES-CTR with a 128-bit counter: KEY, IV (the initial counter block), PLAINTEXT, CIPHERTEXT.
pub(super) fn ctr(file: &'static str, text: &str) -> Result<Vec<Vector>> {
    entries(file, text)
        .map(|entry| {
            Ok(Vector {
                key: entry.bytes("key")?,
                iv: entry.bytes("iv")?,
                aad: Vec::new(),
                plaintext: entry.bytes("plaintext")?,
                ciphertext: entry.bytes("ciphertext")?,
                tag: Vec::new(),
                kind: Kind::Ctr,
                place: entry.place,
            })
        })
        .collect()
}

/// GCM encryption: Key, IV, PT, AAD, CT, Tag (possibly shorter than 16 bytes).
pub(super) fn gcm_encrypt(file: &'static str, text: &str) -> Result<Vec<Vector>> {
    entries(file, text).map(|entry| entry.gcm(Kind::Seal, entry.bytes("pt")?)).collect()
}

/// GCM decryption: Key, IV, CT, AAD, Tag, and either PT or the word FAIL.
pub(super) fn gcm_decrypt(file: &'static str, text: &str) -> Result<Vec<Vector>> {
    entries(file, text)
        .map(|entry| match entry.find("fail") {
            Some(_) => entry.gcm(Kind::Forged, Vec::new()),
            None => entry.gcm(Kind::Open, entry.bytes("pt")?),
        })
        .collect()
}

/// The lines between one `Count = n` and the next.
struct Entry<'a> {
    place: String,
    fields: Vec<(String, &'a str)>,
}

fn entries<'a>(file: &'static str, text: &'a str) -> impl Iterator<Item = Entry<'a>> {
    let mut entries: Vec<Entry<'a>> = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let (name, value) = line.split_once('=').unwrap_or((line, ""));
        let name = name.trim().to_ascii_lowercase();
        match entries.last_mut() {
            _ if name == "count" => {
                entries.push(Entry { place: format!("{file}:{number}"), fields: Vec::new() });
            }
            Some(entry) if !name.is_empty() && !name.starts_with('[') => {
                entry.fields.push((name, value.trim()))
            }
            _ => {}
        }
    }
    entries.into_iter()
}

impl Entry<'_> {
    fn find(&self, name: &str) -> Option<&str> {
        self.fields.iter().find(|(field, _)| field == name).map(|(_, value)| *value)
    }

    fn bytes(&self, name: &str) -> Result<Vec<u8>> {
        let value = self.find(name).ok_or_else(|| malformed(&self.place, format!("no {name}")))?;
        unhex(&self.place, name, value)
    }

    fn gcm(&self, kind: Kind, plaintext: Vec<u8>) -> Result<Vector> {
        Ok(Vector {
            key: self.bytes("key")?,
            iv: self.bytes("iv")?,
            aad: self.bytes("aad")?,
            plaintext,
            ciphertext: self.bytes("ct")?,
            tag: self.bytes("tag")?,
            kind,
            place: self.place.clone(),
        })
    }
}

#[derive(serde::Deserialize)]
#[serde(rename_all = "camelCase")]
struct Wycheproof {
    number_of_tests: usize,
    test_groups: Vec<WycheproofGroup>,
}

#[derive(serde::Deserialize)]
struct WycheproofGroup {
    tests: Vec<WycheproofTest>,
}

/// AEAD tests have `aad` and `ct`; MAC tests have neither, and their `msg` is what GCM calls AAD.
#[derive(serde::Deserialize)]
#[serde(rename_all = "camelCase")]
struct WycheproofTest {
    tc_id: usize,
    key: String,
    iv: String,
    aad: Option<String>,
    msg: String,
    ct: Option<String>,
    tag: String,
    result: String,
}

/// Wycheproof `aead_test_schema` and `mac_with_iv_test_schema`.
pub(super) fn wycheproof(file: &'static str, text: &str) -> Result<Vec<Vector>> {
    let parsed: Wycheproof =
        serde_json::from_str(text).map_err(|error| malformed(file, error.to_string()))?;
    let tests = parsed.test_groups.iter().flat_map(|group| &group.tests);
    let vectors: Vec<_> = tests.map(|test| test.vector(file)).collect::<Result<_>>()?;
    if vectors.len() != parsed.number_of_tests {
        let what = format!("{} tests, but it announces {}", vectors.len(), parsed.number_of_tests);
        return Err(malformed(file, what));
    }
    Ok(vectors)
}

impl WycheproofTest {
    fn vector(&self, file: &str) -> Result<Vector> {
        let place = format!("{file} tcId {}", self.tc_id);
        let bytes = |name: &str, value: &str| unhex(&place, name, value);
        let is_mac = self.ct.is_none();
        let kind = match (self.result.as_str(), is_mac) {
            ("valid", false) => Kind::Seal,
            ("valid", true) => Kind::Gmac,
            ("invalid", false) => Kind::Forged,
            ("invalid", true) => Kind::ForgedGmac,
            (other, _) => return Err(malformed(&place, format!("unknown result {other:?}"))),
        };
        let message = bytes("msg", &self.msg)?;
        let (aad, plaintext) = match &self.aad {
            Some(aad) => (bytes("aad", aad)?, message),
            None => (message, Vec::new()),
        };
        Ok(Vector {
            key: bytes("key", &self.key)?,
            iv: bytes("iv", &self.iv)?,
            aad,
            plaintext,
            ciphertext: bytes("ct", self.ct.as_deref().unwrap_or_default())?,
            tag: bytes("tag", &self.tag)?,
            kind,
            place,
        })
    }
}

fn unhex(place: &str, name: &str, value: &str) -> Result<Vec<u8>> {
    hex::decode(value).map_err(|error| malformed(place, format!("{name}: {error}")))
}

fn malformed(place: &str, what: String) -> Error {
    Error::File { path: place.into(), what }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A slip in a vendored file must be an error that names the place, not a vector less.
    #[test]
    fn malformed_files_are_errors() {
        let error = |parsed: Result<Vec<Vector>>| parsed.unwrap_err().to_string();
        let good =
            "[Keylen = 128]\r\nCount = 0\r\nKey = 00\r\nIV = 01\r\nPT = \r\nAAD = \r\nCT = \r\nTag = 02\r\n";
        let parsed = gcm_encrypt("a.rsp", good).unwrap();
        assert_eq!(
            (parsed.len(), parsed[0].place.as_str(), parsed[0].tag.as_slice()),
            (1, "a.rsp:2", [2].as_slice())
        );
        assert_eq!(error(gcm_encrypt("a.rsp", &good.replace("IV", "Iw"))), "a.rsp:2: no iv");
        assert!(error(gcm_encrypt("a.rsp", &good.replace("02", "0"))).starts_with("a.rsp:2: tag: "));
        assert_eq!(error(gcm_decrypt("a.rsp", &good.replace("PT", "P"))), "a.rsp:2: no pt");
        assert_eq!(gcm_decrypt("a.rsp", &good.replace("PT = ", "FAIL")).unwrap()[0].kind, Kind::Forged);

        let json = r#"{"numberOfTests": 1, "testGroups": [{"tests": [{"tcId": 7, "key": "", "iv": "", "msg": "",
            "tag": "", "result": "valid"}]}]}"#;
        assert_eq!(wycheproof("b.json", json).unwrap()[0].kind, Kind::Gmac);
        assert_eq!(
            error(wycheproof("b.json", &json.replace(": 1", ": 2"))),
            "b.json: 1 tests, but it announces 2"
        );
        let unknown = error(wycheproof("b.json", &json.replace("valid", "acceptable")));
        assert_eq!(unknown, "b.json tcId 7: unknown result \"acceptable\"");
        assert!(error(wycheproof("b.json", &json[1..])).starts_with("b.json: "));
    }
}
