//! The formats' own tools, installed once into a folder of the tests from the index that pip is configured for.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// The packages, and a mark of this set in the folder's name.
const PACKAGES: [&str; 5] = [
    "spdx-tools==0.8.5",
    "cyclonedx-python-lib[json-validation]==11.12.0",
    "in-toto-attestation==0.9.3",
    "securesystemslib[crypto]==1.6.0",
    "PyNaCl==1.6.2",
];

const CYCLONEDX: &str = r#"
import sys
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
found = JsonStrictValidator(SchemaVersion.V1_6).validate_str(open(sys.argv[1]).read())
if found:
    sys.exit(str(found)[:2000])
"#;

/// The in-toto project's own types, which know no other fields.
const IN_TOTO: &str = r#"
import json, sys
from google.protobuf.json_format import ParseDict
from in_toto_attestation.predicates.provenance.v1.provenance_pb2 import Provenance
from in_toto_attestation.v1 import statement_pb2
from in_toto_attestation.v1.statement import Statement
read = json.load(open(sys.argv[1]))
Statement.copy_from_pb(ParseDict(read, statement_pb2.Statement())).validate()
if read["predicateType"] == "https://slsa.dev/provenance/v1":
    found = ParseDict(read["predicate"], Provenance())
    assert found.build_definition.build_type and found.run_details.builder.id, found
"#;

/// DSSE by the library that TUF and in-toto share.
const ENVELOPE: &str = r#"
import json, sys
from cryptography.hazmat.primitives.serialization import load_pem_public_key
from securesystemslib.dsse import Envelope
from securesystemslib.signer import SSlibKey
key = SSlibKey.from_crypto(load_pem_public_key(open(sys.argv[2], "rb").read()))
key.keyid = ""
Envelope.from_dict(json.load(open(sys.argv[1]))).verify([key], 1)
"#;

/// What `cosign generate-key-pair` does with a key, with Python's scrypt and libsodium's secretbox.
const ENCRYPT: &str = r#"
import base64, hashlib, json, os, sys
from cryptography.hazmat.primitives import serialization as s
from nacl.secret import SecretBox
path, label, password = sys.argv[1:]
key = s.load_pem_private_key(open(path, "rb").read(), None)
der = key.private_bytes(s.Encoding.DER, s.PrivateFormat.PKCS8, s.NoEncryption())
salt, nonce = os.urandom(32), os.urandom(24)
derived = hashlib.scrypt(password.encode(), salt=salt, n=65536, r=8, p=1, maxmem=1 << 27, dklen=32)
text = lambda data: base64.b64encode(data).decode()
body = text(json.dumps({
    "kdf": {"name": "scrypt", "params": {"N": 65536, "r": 8, "p": 1}, "salt": text(salt)},
    "cipher": {"name": "nacl/secretbox", "nonce": text(nonce)},
    "ciphertext": text(SecretBox(derived).encrypt(der, nonce).ciphertext),
}).encode())
print(f"-----BEGIN {label}-----")
for at in range(0, len(body), 64):
    print(body[at:at + 64])
print(f"-----END {label}-----")
"#;

/// Validators of documents.
pub(crate) struct Validators {
    folder: PathBuf,
}

impl Validators {
    /// None where there is no Python, or pip reaches no index; not so in CI.
    pub(crate) fn get() -> Option<Self> {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("validators-3");
        let gate = File::create(folder.with_extension("lock")).unwrap();
        gate.lock().unwrap();
        let done = folder.join("done");
        if done.exists() {
            return Some(Self { folder });
        }
        let _ = std::fs::remove_dir_all(&folder);
        let run = |program: &Path, arguments: &[&str]| {
            let output = Command::new(program).args(arguments).output().map_err(|error| error.to_string())?;
            if output.status.success() {
                Ok(())
            } else {
                Err(String::from_utf8_lossy(&output.stderr).into_owned())
            }
        };
        let made = run(Path::new("python3"), &["-m", "venv", folder.to_str().unwrap()]).and_then(|()| {
            run(&folder.join("bin/pip"), &[&["install", "--quiet", "--no-input"], &PACKAGES[..]].concat())
        });
        match made {
            Ok(()) => std::fs::write(done, "").unwrap(),
            Err(error) => {
                assert_ne!(
                    std::env::var("CI").as_deref(),
                    Ok("true"),
                    "CI must have the validators: {error}"
                );
                eprintln!("SKIPPED, the validators cannot be installed: {error}");
                return None;
            }
        }
        Some(Self { folder })
    }

    fn python(&self, script: &str, document: &[u8], name: &str) -> Result<(), String> {
        let room = tempfile::tempdir().unwrap();
        let path = room.path().join(name);
        std::fs::write(&path, document).unwrap();
        told(&Command::new(self.folder.join("bin/python")).args(["-c", script]).arg(&path).output().unwrap())
    }

    /// Whether the key in the file `public` has signed an envelope, by `securesystemslib`.
    pub(crate) fn envelope(&self, envelope: &[u8], public: &Path) -> Result<(), String> {
        let room = tempfile::tempdir().unwrap();
        let path = room.path().join("envelope.json");
        std::fs::write(&path, envelope).unwrap();
        let python = self.folder.join("bin/python");
        told(&Command::new(python).args(["-c", ENVELOPE]).arg(&path).arg(public).output().unwrap())
    }

    /// A private key, encrypted as cosign does it.
    pub(crate) fn encrypted(&self, private: &Path, label: &str, password: &str) -> Vec<u8> {
        let python = self.folder.join("bin/python");
        let output =
            Command::new(python).args(["-c", ENCRYPT]).arg(private).args([label, password]).output().unwrap();
        told(&output).unwrap();
        output.stdout
    }

    /// The word of the SPDX project's `pyspdxtools`.
    pub(crate) fn spdx(&self, document: &[u8]) -> Result<(), String> {
        let room = tempfile::tempdir().unwrap();
        let path = room.path().join("image.spdx.json");
        std::fs::write(&path, document).unwrap();
        told(&Command::new(self.folder.join("bin/pyspdxtools")).arg("-i").arg(&path).output().unwrap())
    }

    /// The word of the in-toto project's `in-toto-attestation`, which knows SLSA provenance, too.
    pub(crate) fn in_toto(&self, document: &[u8]) -> Result<(), String> {
        self.python(IN_TOTO, document, "statement.json")
    }

    /// The word of the CycloneDX project's own schema, in its strict form.
    pub(crate) fn cyclonedx(&self, document: &[u8]) -> Result<(), String> {
        self.python(CYCLONEDX, document, "image.cdx.json")
    }
}

fn told(output: &Output) -> Result<(), String> {
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr).chars().take(3000).collect::<String>();
    Err(format!("{}{said}", String::from_utf8_lossy(&output.stdout)))
}
