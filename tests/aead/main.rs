//! AES-GCM, GMAC and CTR through the public interface.

mod emulated;
mod interface;
mod model;
