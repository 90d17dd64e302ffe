//! OpenSSL's AES-GCM and AES-CTR, where the system has its library: loaded at run time, so that nothing links to it.

use std::ffi::{CStr, c_char, c_int, c_uchar, c_void};
use std::ptr::{null, null_mut};

use libloading::Library;

type Pointer = *mut c_void;
type New = unsafe extern "C" fn() -> Pointer;
type Free = unsafe extern "C" fn(Pointer);
type Init =
    unsafe extern "C" fn(Pointer, *const c_void, Pointer, *const c_uchar, *const c_uchar, c_int) -> c_int;
type Update = unsafe extern "C" fn(Pointer, *mut c_uchar, *mut c_int, *const c_uchar, c_int) -> c_int;
type Finish = unsafe extern "C" fn(Pointer, *mut c_uchar, *mut c_int) -> c_int;
type Control = unsafe extern "C" fn(Pointer, c_int, c_int, Pointer) -> c_int;

/// `EVP_CTRL_AEAD_GET_TAG` and `EVP_CTRL_AEAD_SET_TAG` of openssl/evp.h.
const GET_TAG: c_int = 0x10;
const SET_TAG: c_int = 0x11;

/// A cipher with its key, ready for messages.
pub(crate) struct Cipher {
    context: Pointer,
    init: Init,
    update: Update,
    finish: Finish,
    control: Control,
    free: Free,
    /// Last, so that it is unloaded last.
    library: Library,
}

impl Cipher {
    /// `mode` is "gcm" or "ctr". None where there is no OpenSSL 3.
    pub(crate) fn new(mode: &str, key: &[u8]) -> Option<Self> {
        // SAFETY: loading runs OpenSSL's own initialisation; the types are those of openssl/evp.h, and the functions are kept
        // no longer than the library; the key is as long as the cipher's name says.
        unsafe {
            let library = Library::new("libcrypto.so.3").ok()?;
            let named: Init = *library.get(b"EVP_CipherInit_ex").ok()?;
            let kind: unsafe extern "C" fn() -> *const c_void =
                *library.get(format!("EVP_aes_{}_{mode}", 8 * key.len()).as_bytes()).ok()?;
            let new: New = *library.get(b"EVP_CIPHER_CTX_new").ok()?;
            let cipher = Self {
                init: named,
                update: *library.get(b"EVP_CipherUpdate").ok()?,
                finish: *library.get(b"EVP_CipherFinal_ex").ok()?,
                control: *library.get(b"EVP_CIPHER_CTX_ctrl").ok()?,
                free: *library.get(b"EVP_CIPHER_CTX_free").ok()?,
                context: new(),
                library,
            };
            assert_eq!(named(cipher.context, kind(), null_mut(), key.as_ptr(), null(), 1), 1, "the key");
            Some(cipher)
        }
    }

    /// OpenSSL's version, as it says itself.
    pub(crate) fn version(&self) -> String {
        // SAFETY: `const char *OpenSSL_version(int)` returns a static string.
        unsafe {
            let version: unsafe extern "C" fn(c_int) -> *const c_char =
                *self.library.get(b"OpenSSL_version").expect("OpenSSL 3 has it");
            CStr::from_ptr(version(0)).to_string_lossy().into_owned()
        }
    }

    /// Seals in place.
    pub(crate) fn seal(&mut self, iv: &[u8; 12], aad: &[u8], data: &mut [u8]) -> [u8; 16] {
        let mut tag = [0; 16];
        self.start(iv, 1);
        self.additional(aad);
        self.text(data);
        assert!(self.end(), "sealing can't fail");
        // SAFETY: the tag has 16 bytes.
        let given = unsafe { (self.control)(self.context, GET_TAG, 16, tag.as_mut_ptr().cast()) };
        assert_eq!(given, 1, "a tag");
        tag
    }

    /// Opens in place; whether it verified.
    pub(crate) fn open(&mut self, iv: &[u8; 12], aad: &[u8], data: &mut [u8], tag: &[u8; 16]) -> bool {
        self.start(iv, 0);
        // SAFETY: the tag has 16 bytes, which are only read.
        let set = unsafe { (self.control)(self.context, SET_TAG, 16, tag.as_ptr().cast_mut().cast()) };
        assert_eq!(set, 1, "a tag");
        self.additional(aad);
        self.text(data);
        self.end()
    }

    /// XORs the keystream that begins with the counter block.
    pub(crate) fn ctr(&mut self, counter: &[u8; 16], data: &mut [u8]) {
        self.start(counter, 1);
        self.text(data);
    }

    fn start(&mut self, iv: &[u8], seal: c_int) {
        // SAFETY: the context has its cipher, and the IV is as long as that wants.
        let started = unsafe { (self.init)(self.context, null(), null_mut(), null(), iv.as_ptr(), seal) };
        assert_eq!(started, 1, "an IV");
    }

    fn additional(&mut self, aad: &[u8]) {
        self.update(null_mut(), aad.as_ptr(), aad.len());
    }

    fn text(&mut self, data: &mut [u8]) {
        self.update(data.as_mut_ptr(), data.as_ptr(), data.len());
    }

    fn update(&mut self, output: *mut c_uchar, input: *const c_uchar, bytes: usize) {
        let bytes = c_int::try_from(bytes).expect("no message here is that long");
        let mut written = 0;
        // SAFETY: the input has so many bytes, and the output, unless it is null, is the same memory, which OpenSSL allows.
        let updated = unsafe { (self.update)(self.context, output, &mut written, input, bytes) };
        assert_eq!(updated, 1, "a message");
    }

    fn end(&mut self) -> bool {
        let (mut rest, mut written) = ([0; 16], 0);
        // SAFETY: room for a block, though these modes leave none.
        unsafe { (self.finish)(self.context, rest.as_mut_ptr(), &mut written) == 1 }
    }
}

impl Drop for Cipher {
    fn drop(&mut self) {
        // SAFETY: made by `EVP_CIPHER_CTX_new`, and freed once.
        unsafe { (self.free)(self.context) };
    }
}
