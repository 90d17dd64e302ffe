//! Seals a message with AES-256-GCM and opens it again.
//!
//!     cargo run --release --example seal

#![expect(clippy::print_stdout, reason = "an example shows its results")]

use ringseal::aead::{Aead, AesKey, Iv};
use ringseal::{Error, backend};

fn main() -> ringseal::Result<()> {
    // In earnest the key comes from a key exchange, and a nonce never comes twice with one key.
    let key = AesKey::from_bytes(&[0x42; 32])?;
    let nonce = Iv::from_nonce(&[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]);
    let header = b"step 7, layer 3";

    // "auto" would take the GPU where there is one.
    let aead = Aead::new(&*backend::by_name("cpu")?, &key)?;
    let mut data = b"gradients of a private model".to_vec();
    let tag = aead.seal_in_place(nonce, header, &mut data)?;
    println!("sealed: {} and tag {}", hex::encode(&data), hex::encode(tag));

    let mut forged = data.clone();
    forged[0] ^= 1;
    match aead.open_in_place(nonce, header, &mut forged, &tag) {
        Err(Error::Authentication) => {
            println!("one flipped bit: refused, and the buffer is zeroed: {}", forged[1] == 0)
        }
        other => panic!("a forgery must be refused, but: {other:?}"),
    }

    aead.open_in_place(nonce, header, &mut data, &tag)?;
    println!("opened: {}", String::from_utf8_lossy(&data));
    Ok(())
}
