//! AES-GCM's public interface: sealing, opening, limits and refusals, on every backend that has it.

use hex::decode as unhex;
use ringseal::Error;
use ringseal::aead::{Aead, AesKey, Iv};

/// cases.md 4: IVs of every length, not only 96 bits.
#[test]
fn iv_of_other_lengths() {
    let key = AesKey::from_bytes(&unhex("000102030405060708090a0b0c0d0e0f").unwrap()).unwrap();
    let aead = Aead::new(ringseal::backend::by_name("cpu").unwrap().as_ref(), &key).unwrap();
    for (bytes, ciphertext, tag) in [
        (8, "a6294c", "59f157c7fd4c49f15f4c35589b1f0d46"),
        (11, "45bcc8", "0c14dd848bb3f3e81a25653da4643a95"),
        (13, "bb77f1", "ffbf0fac319b0afc899f30b403913abd"),
        (16, "cbcaf0", "f964e7f4123f8f1c71b8802153c06fee"),
    ] {
        let iv: Vec<u8> = (0..bytes).collect();
        let mut data = *b"abc";
        let sealed = aead.seal_in_place(Iv::new(&iv).unwrap(), b"", &mut data).unwrap();
        assert_eq!(
            (hex::encode(data), hex::encode(sealed)),
            (ciphertext.into(), tag.into()),
            "{bytes} bytes"
        );
    }
    assert!(matches!(Iv::new(&[]), Err(Error::Length { what: "IV", got: 0, .. })));
}
