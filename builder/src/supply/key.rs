//! Keys that sign and verify: ECDSA over P-256 with SHA-256, and Ed25519, in the files of cosign and openssl.
//!
//! A private key is PKCS#8 in PEM, plain (`PRIVATE KEY`) or encrypted as `cosign generate-key-pair` does it (`ENCRYPTED
//! SIGSTORE PRIVATE KEY`: scrypt and NaCl's secretbox). A public key is `PUBLIC KEY`. Left out: other algorithms, PKCS#8's own
//! encryption, certificates, and keys in hardware.

use std::io::Read as _;
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use crypto_secretbox::aead::Aead as _;
use crypto_secretbox::{KeyInit as _, XSalsa20Poly1305};
use ring::rand::SystemRandom;
use ring::signature::{
    ECDSA_P256_SHA256_ASN1, ECDSA_P256_SHA256_ASN1_SIGNING, ED25519, EcdsaKeyPair, Ed25519KeyPair,
    KeyPair as _, UnparsedPublicKey,
};
use serde::Deserialize;

/// Most bytes of a key file.
const LARGEST: u64 = 64 << 10;
/// Most bytes of memory that scrypt may take. cosign's own parameters take 64 MiB.
const MOST_MEMORY: u64 = 256 << 20;
/// Most times that scrypt may go over it.
const MOST_PASSES: u32 = 16;

/// What stands before the bytes of a public key in its DER form (RFC 5480, and RFC 8410 for Ed25519).
const P256_PREFIX: [u8; 26] = [
    0x30, 0x59, 0x30, 0x13, 0x06, 0x07, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x02, 0x01, 0x06, 0x08, 0x2a, 0x86,
    0x48, 0xce, 0x3d, 0x03, 0x01, 0x07, 0x03, 0x42, 0x00,
];
const ED25519_PREFIX: [u8; 12] = [0x30, 0x2a, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x03, 0x21, 0x00];

/// Why a key cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file cannot be read.
    #[error("cannot read the key {path}: {source}", path = .path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// It is no key, or of a kind that is not known.
    #[error("{path} is no key that can be used: {message}", path = .path.display())]
    Kind {
        /// The file.
        path: PathBuf,
        /// What was found and needed.
        message: String,
    },
    /// It is encrypted, and there is no password.
    #[error("the key {path} is encrypted", path = .path.display())]
    NoPassword {
        /// The file.
        path: PathBuf,
    },
    /// The password is not its.
    #[error("the key {path} cannot be decrypted: the password is another, or the file is damaged", path = .path.display())]
    Password {
        /// The file.
        path: PathBuf,
    },
    /// The system gives no random numbers.
    #[error("cannot sign: the system gives no random numbers")]
    Random,
}

impl Error {
    /// The way out.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Self::NoPassword { .. } => {
                Some("set COSIGN_PASSWORD, or name a file that holds the password with --password-file")
            }
            Self::Password { .. } => Some("see what COSIGN_PASSWORD or --password-file says"),
            Self::Kind { .. } => Some(
                "make keys with `cosign generate-key-pair`, or with `openssl genpkey -algorithm ed25519` and `openssl pkey -pubout`",
            ),
            Self::Read { .. } | Self::Random => None,
        }
    }
}

/// A key that signs.
#[derive(Debug)]
pub struct PrivateKey(Pair);

#[derive(Debug)]
enum Pair {
    P256(EcdsaKeyPair),
    Ed25519(Ed25519KeyPair),
}

/// A key that verifies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PublicKey {
    /// ECDSA over P-256 with SHA-256: the uncompressed point.
    P256(Vec<u8>),
    /// Ed25519.
    Ed25519(Vec<u8>),
}

/// The document in an encrypted key.
#[derive(Deserialize)]
struct Encrypted {
    kdf: Derivation,
    cipher: Cipher,
    ciphertext: String,
}

#[derive(Deserialize)]
struct Derivation {
    name: String,
    params: Parameters,
    salt: String,
}

#[derive(Deserialize)]
struct Parameters {
    #[serde(rename = "N")]
    cost: u64,
    r: u32,
    p: u32,
}

#[derive(Deserialize)]
struct Cipher {
    name: String,
    nonce: String,
}

impl PrivateKey {
    /// Reads a key file. `password` is that of an encrypted one.
    ///
    /// # Errors
    /// When it cannot be read or decrypted, or is no key that can be used.
    pub fn read(path: &Path, password: Option<&[u8]>) -> Result<Self, Error> {
        let wrong = |message: &str| Error::Kind { path: path.to_owned(), message: message.to_owned() };
        let text = file(path)?;
        let (label, bytes) =
            pem_rfc7468::decode_vec(text.as_bytes()).map_err(|error| wrong(&error.to_string()))?;
        let der = match label {
            "PRIVATE KEY" => bytes,
            "ENCRYPTED SIGSTORE PRIVATE KEY" | "ENCRYPTED COSIGN PRIVATE KEY" => {
                let password = password.ok_or_else(|| Error::NoPassword { path: path.to_owned() })?;
                decrypt(&bytes, password, path)?
            }
            other => {
                return Err(wrong(&format!(
                    "it is {other:?}; known are \"PRIVATE KEY\" and \"ENCRYPTED SIGSTORE PRIVATE KEY\""
                )));
            }
        };
        if let Ok(pair) = Ed25519KeyPair::from_pkcs8_maybe_unchecked(&der) {
            return Ok(Self(Pair::Ed25519(pair)));
        }
        EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_ASN1_SIGNING, &der, &SystemRandom::new())
            .map(|pair| Self(Pair::P256(pair)))
            .map_err(|error| {
                wrong(&format!("it is neither ECDSA over P-256 nor Ed25519 in PKCS#8 ({error})"))
            })
    }

    /// The key that verifies what this one signs.
    pub fn public(&self) -> PublicKey {
        match &self.0 {
            Pair::P256(pair) => PublicKey::P256(pair.public_key().as_ref().to_vec()),
            Pair::Ed25519(pair) => PublicKey::Ed25519(pair.public_key().as_ref().to_vec()),
        }
    }

    /// Signs `bytes`. Of P-256 each signature is another.
    ///
    /// # Errors
    /// When the system gives no random numbers.
    pub fn sign(&self, bytes: &[u8]) -> Result<Vec<u8>, Error> {
        match &self.0 {
            Pair::P256(pair) => {
                let signed = pair.sign(&SystemRandom::new(), bytes).map_err(|_| Error::Random)?;
                Ok(signed.as_ref().to_vec())
            }
            Pair::Ed25519(pair) => Ok(pair.sign(bytes).as_ref().to_vec()),
        }
    }
}

impl PublicKey {
    /// Reads a key file.
    ///
    /// # Errors
    /// When it cannot be read, or is no key that can be used.
    pub fn read(path: &Path) -> Result<Self, Error> {
        let wrong = |message: String| Error::Kind { path: path.to_owned(), message };
        let text = file(path)?;
        let (label, der) =
            pem_rfc7468::decode_vec(text.as_bytes()).map_err(|error| wrong(error.to_string()))?;
        if label != "PUBLIC KEY" {
            return Err(wrong(format!("it is {label:?}; needed is \"PUBLIC KEY\"")));
        }
        match (der.strip_prefix(&P256_PREFIX), der.strip_prefix(&ED25519_PREFIX)) {
            (Some(point), _) if point.len() == 65 => Ok(Self::P256(point.to_vec())),
            (_, Some(key)) if key.len() == 32 => Ok(Self::Ed25519(key.to_vec())),
            _ => Err(wrong("it is neither ECDSA over P-256 nor Ed25519".to_owned())),
        }
    }

    /// Whether `signature` is one of `bytes` by this key's private one.
    pub fn verifies(&self, bytes: &[u8], signature: &[u8]) -> bool {
        match self {
            Self::P256(key) => UnparsedPublicKey::new(&ECDSA_P256_SHA256_ASN1, key).verify(bytes, signature),
            Self::Ed25519(key) => UnparsedPublicKey::new(&ED25519, key).verify(bytes, signature),
        }
        .is_ok()
    }
}

/// A key file's text, of which no more is read than any key has.
fn file(path: &Path) -> Result<String, Error> {
    let read = |source| Error::Read { path: path.to_owned(), source };
    let mut text = String::new();
    let opened = fs_err::File::open(path).map_err(read)?;
    opened.take(LARGEST).read_to_string(&mut text).map_err(read)?;
    Ok(text)
}

fn decrypt(document: &[u8], password: &[u8], path: &Path) -> Result<Vec<u8>, Error> {
    let wrong = |message: String| Error::Kind { path: path.to_owned(), message };
    let read: Encrypted = serde_json::from_slice(document).map_err(|error| wrong(error.to_string()))?;
    let (kdf, cipher) = (&read.kdf, &read.cipher);
    if kdf.name != "scrypt" || cipher.name != "nacl/secretbox" {
        let found = format!("it is encrypted with {:?} and {:?}", kdf.name, cipher.name);
        return Err(wrong(format!("{found}; known are \"scrypt\" and \"nacl/secretbox\"")));
    }
    let Parameters { cost, r, p } = kdf.params;
    let memory = cost.saturating_mul(u64::from(r)).saturating_mul(128);
    let log = u8::try_from(cost.checked_ilog2().unwrap_or_default()).unwrap_or_default();
    let usable = cost.is_power_of_two() && memory <= MOST_MEMORY && p <= MOST_PASSES;
    let parameters = scrypt::Params::new(log, r, p).ok().filter(|_| usable);
    let parameters =
        parameters.ok_or_else(|| wrong(format!("scrypt with N={cost}, r={r}, p={p} is not allowed")))?;
    let decoded = |what: &str, text: &str| {
        STANDARD.decode(text).map_err(|_| wrong(format!("its {what} is not base64")))
    };
    let mut key = [0; 32];
    scrypt::scrypt(password, &decoded("salt", &kdf.salt)?, &parameters, &mut key)
        .map_err(|error| wrong(error.to_string()))?;
    let nonce: [u8; 24] = decoded("nonce", &cipher.nonce)?
        .try_into()
        .map_err(|_| wrong("its nonce has not 24 bytes".to_owned()))?;
    XSalsa20Poly1305::new(&key.into())
        .decrypt(&nonce.into(), decoded("ciphertext", &read.ciphertext)?.as_slice())
        .map_err(|_| Error::Password { path: path.to_owned() })
}
