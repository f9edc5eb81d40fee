//! Who asks: passwords, tokens of a token server, helpers, and TLS.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use serde_json::{Value, json};
use tiny_http::{Method, Response, Server as Http};
use trainyard_builder::http::Network;
use trainyard_builder::registry::{Artifact, Error, Options, Repository};
use trainyard_builder::settings::Settings;
use trainyard_spec::image::Platform;

use super::parts::{
    Login, PASSWORD, Registry, USER, connect, image, password_for, quiet, reference, settings, tool,
    with_auth_file,
};
use super::proxy::{Fate, Proxy, Seen};

#[test]
fn a_password_lets_in_whoever_knows_it_and_is_never_shown() {
    let Some(registry) = Registry::start(&Login::Basic) else { return };
    let (room, settings) = settings();
    let (layout, image) = image(&room.path("image"), 500, &[1000]);
    let reference = registry.reference("team/fixture");
    let host = reference.host().to_owned();
    let push = |settings: &Settings| connect(&reference, settings).push(&layout.folder, &quiet);

    let error = push(&settings).unwrap_err();
    assert!(matches!(error, Error::Unauthorized { shown: false, .. }), "{error:?}");
    assert_eq!(error.hint().unwrap(), format!("log in with: podman login {host}"));

    let wrong = with_auth_file(&settings, room.folder.path(), &password_for(&host, "hunter2"));
    let error = push(&wrong).unwrap_err();
    assert!(matches!(error, Error::Unauthorized { shown: true, .. }), "{error:?}");
    let said = format!("{error} {error:?} {} {wrong:?}", error.hint().unwrap());
    assert!(!said.contains("hunter2") && !said.contains(&STANDARD.encode("ali:hunter2")), "{said}");

    let namespace = password_for(&format!("{host}/team"), PASSWORD);
    for file in [password_for(&host, PASSWORD), namespace] {
        let known = with_auth_file(&settings, room.folder.path(), &file);
        assert_eq!(push(&known).unwrap().digest, image.digest);
        assert_eq!(connect(&reference, &known).pull(Platform::Amd64, &quiet).unwrap().digest, image.digest);
    }
    let other = password_for(&format!("{host}/other"), PASSWORD);
    let error = push(&with_auth_file(&settings, room.folder.path(), &other)).unwrap_err();
    assert!(matches!(error, Error::Unauthorized { shown: false, .. }), "{error:?}");
}

#[test]
fn a_helper_lets_in_and_one_that_fails_is_named() {
    use std::os::unix::fs::PermissionsExt;
    let Some(registry) = Registry::start(&Login::Basic) else { return };
    let (room, settings) = settings();
    let (layout, image) = image(&room.path("image"), 510, &[1000]);
    let reference = registry.reference("fixture");
    let helper = |name: &str, script: &str| {
        let path = room.path(&format!("docker-credential-{name}"));
        std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        std::fs::set_permissions(path, PermissionsExt::from_mode(0o755)).unwrap();
    };
    helper(
        "good",
        &format!(
            r#"read -r host; [ "$host" = "{}" ] && echo '{{"Username":"{USER}","Secret":"{PASSWORD}"}}'"#,
            reference.host()
        ),
    );
    helper("bad", "echo hunter2; exit 1");
    let with = |name: &str| {
        let file = json!({"credHelpers": {reference.host(): name}});
        let mut known = with_auth_file(&settings, room.folder.path(), &file);
        let path = format!("{}:/usr/bin:/bin", room.folder.path().display());
        known.credentials.environment.insert("PATH".into(), path.into());
        known
    };
    assert_eq!(connect(&reference, &with("good")).push(&layout.folder, &quiet).unwrap().digest, image.digest);
    let error = connect(&reference, &with("bad")).push(&layout.folder, &quiet).unwrap_err();
    let said = format!("{error} {}", error.hint().unwrap());
    assert!(said.contains("docker-credential-bad") && !said.contains("hunter2"), "{said}");
}

/// A key and a certificate for it, made by openssl; none where that is missing and may be.
fn key_pair(folder: &Path) -> Option<(PathBuf, PathBuf)> {
    let path = |name: &str| folder.join(name).to_str().unwrap().to_owned();
    let config = "[req]\ndistinguished_name=name\nx509_extensions=more\n[name]\n[more]\nbasicConstraints=critical,CA:FALSE\nsubjectAltName=IP:127.0.0.1\n";
    std::fs::write(path("openssl.cnf"), config).unwrap();
    let (key, certificate) = (path("key.pem"), path("certificate.pem"));
    let make = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=test"];
    let files = ["-config", &path("openssl.cnf"), "-keyout", &key, "-out", &certificate];
    tool("openssl", &[&make[..], &files].concat())?;
    let (key, certificate) = (PathBuf::from(key), PathBuf::from(certificate));
    Some((key, certificate))
}

/// A request to the token server.
#[derive(Debug, Clone)]
struct Asked {
    method: Method,
    authorization: Option<String>,
    /// Query, or form.
    parameters: Vec<(String, String)>,
}

impl Asked {
    fn all(&self, name: &str) -> Vec<&str> {
        self.parameters.iter().filter(|(key, _)| key == name).map(|(_, value)| value.as_str()).collect()
    }
}

/// A token server: anybody may pull, the user with the password or the refresh token may push.
struct Tokens {
    realm: String,
    certificate: PathBuf,
    asked: Arc<Mutex<Vec<Asked>>>,
    http: Arc<Http>,
}

const REFRESH_TOKEN: &str = "refresh me";

impl Tokens {
    /// A server whose tokens' lives, in seconds, are told by `life`: what it says, and what is true.
    fn start(folder: &Path, life: impl Fn(usize) -> (u64, i64) + Send + 'static) -> Option<Self> {
        let (key, certificate) = key_pair(folder)?;
        let http = Arc::new(Http::http("127.0.0.1:0").unwrap());
        let realm = format!("http://{}/token?fixed=yes", http.server_addr().to_ip().unwrap());
        let asked = Arc::new(Mutex::new(Vec::new()));
        let der: String = std::fs::read_to_string(&certificate)
            .unwrap()
            .lines()
            .filter(|line| !line.starts_with("--"))
            .collect();
        std::thread::spawn({
            let (http, asked) = (Arc::clone(&http), Arc::clone(&asked));
            move || {
                for mut request in http.incoming_requests() {
                    let mut text = request.url().split('?').nth(1).unwrap_or_default().to_owned();
                    if *request.method() == Method::Post {
                        text.clear();
                        request.as_reader().read_to_string(&mut text).unwrap();
                    }
                    let authorization = request.headers().iter().find(|one| one.field.equiv("authorization"));
                    let one = Asked {
                        method: request.method().clone(),
                        authorization: authorization.map(|one| one.value.to_string()),
                        parameters: url::form_urlencoded::parse(text.as_bytes()).into_owned().collect(),
                    };
                    let nth = {
                        let mut asked = asked.lock().unwrap();
                        asked.push(one.clone());
                        asked.len() - 1
                    };
                    let response = match grant(&one) {
                        None => Response::from_string("{}").with_status_code(401),
                        Some(access) => {
                            let (says, lasts) = life(nth);
                            let token = sign(&access, lasts, &key, &der);
                            let answer = json!({"token": token, "expires_in": says});
                            Response::from_string(answer.to_string())
                        }
                    };
                    let _ = request.respond(response);
                }
            }
        });
        Some(Self { realm, certificate, asked, http })
    }

    fn asked(&self) -> Vec<Asked> {
        self.asked.lock().unwrap().clone()
    }

    fn registry(&self) -> Option<Registry> {
        Registry::start(&Login::Token { realm: &self.realm, certificate: &self.certificate })
    }
}

impl Drop for Tokens {
    fn drop(&mut self) {
        self.http.unblock();
    }
}

/// What is granted of what is asked for; nothing where a password is wrong.
fn grant(asked: &Asked) -> Option<Vec<Value>> {
    assert_eq!(asked.all("service"), ["test registry"]);
    let known = if asked.method == Method::Post {
        assert_eq!(asked.all("grant_type"), ["refresh_token"]);
        if asked.all("refresh_token") != [REFRESH_TOKEN] {
            return None;
        }
        true
    } else {
        assert_eq!(asked.all("fixed"), ["yes"], "the realm's own query stays");
        let basic = format!("Basic {}", STANDARD.encode(format!("{USER}:{PASSWORD}")));
        match &asked.authorization {
            None => false,
            Some(shown) if *shown == basic => true,
            Some(_) => return None,
        }
    };
    let scopes = asked.all("scope");
    let access = scopes.iter().flat_map(|scope| scope.split(' ')).map(|scope| {
        let mut parts = scope.splitn(3, ':');
        let (kind, name, actions) = (parts.next().unwrap(), parts.next().unwrap(), parts.next().unwrap());
        let actions: Vec<&str> = actions.split(',').filter(|action| known || *action == "pull").collect();
        json!({"type": kind, "name": name, "actions": actions})
    });
    Some(access.collect())
}

/// A token as docker-registry wants it: a JSON Web Token, signed with RSA, with its certificate.
#[expect(clippy::disallowed_methods, reason = "tokens are good from one time to another")]
fn sign(access: &[Value], life: i64, key: &Path, certificate: &str) -> String {
    let now = i64::try_from(SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs()).unwrap();
    let part = |value: Value| URL_SAFE_NO_PAD.encode(value.to_string());
    let signed = format!(
        "{}.{}",
        part(json!({"typ": "JWT", "alg": "RS256", "x5c": [certificate]})),
        part(json!({
            "iss": "test issuer", "sub": USER, "aud": "test registry", "access": access, "jti": "1",
            "exp": now + life, "nbf": now - 1000, "iat": now - 1000,
        }))
    );
    let mut openssl = Command::new("openssl")
        .args(["dgst", "-sha256", "-sign", key.to_str().unwrap()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    std::io::Write::write_all(&mut openssl.stdin.take().unwrap(), signed.as_bytes()).unwrap();
    let signature = openssl.wait_with_output().unwrap().stdout;
    format!("{signed}.{}", URL_SAFE_NO_PAD.encode(signature))
}

#[test]
fn tokens_are_had_for_what_is_done_and_by_nobody_else() {
    let (room, settings) = settings();
    let Some(tokens) = Tokens::start(room.folder.path(), |_| (300, 300)) else { return };
    let Some(registry) = tokens.registry() else { return };
    let (layout, image) = image(&room.path("image"), 520, &[1000, 2000, 3000, 4000]);
    let reference = registry.reference("team/fixture:1");
    let host = reference.host().to_owned();

    // Anybody gets a token, and it does not let them push.
    let error = connect(&reference, &settings).push(&layout.folder, &quiet).unwrap_err();
    assert!(matches!(error, Error::Unauthorized { shown: false, .. }), "{error:?}");
    let wrong = with_auth_file(&settings, room.folder.path(), &password_for(&host, "hunter2"));
    let error = connect(&reference, &wrong).push(&layout.folder, &quiet).unwrap_err();
    assert!(matches!(error, Error::Unauthorized { shown: true, .. }), "{error:?}");
    assert!(!format!("{error} {error:?}").contains("hunter2"));

    let before = tokens.asked().len();
    let known = with_auth_file(&settings, room.folder.path(), &password_for(&host, PASSWORD));
    assert_eq!(connect(&reference, &known).push(&layout.folder, &quiet).unwrap().digest, image.digest);
    let asked = tokens.asked();
    assert_eq!(asked.len() - before, 1, "one token for the whole push: {asked:?}");
    assert_eq!(asked[before].all("scope"), ["repository:team/fixture:pull,push"]);
    assert_eq!(asked[before].all("account"), [USER]);

    // Pulling needs nobody's credentials; from another machine.
    let elsewhere = Settings { cache: room.path("elsewhere"), ..settings.clone() };
    assert_eq!(connect(&reference, &elsewhere).pull(Platform::Amd64, &quiet).unwrap().digest, image.digest);
    let last = tokens.asked().pop().unwrap();
    assert_eq!((last.authorization.clone(), last.all("scope")), (None, vec!["repository:team/fixture:pull"]));

    // Another repository takes the blobs from the first: whoever asks has to be allowed to read there.
    let second = connect(&registry.reference("second"), &known).push(&layout.folder, &quiet).unwrap();
    assert_eq!(second.mounted, 5);
    let scopes = ["repository:second:pull,push", "repository:team/fixture:pull"];
    assert!(tokens.asked().iter().any(|one| one.all("scope") == scopes), "{:?}", tokens.asked());

    // A refresh token, as docker keeps them.
    let before = tokens.asked().len();
    let identity = json!({"auths": {&host: {"identitytoken": REFRESH_TOKEN}}});
    let identity = with_auth_file(&settings, room.folder.path(), &identity);
    let artifact = Artifact {
        artifact_type: "application/x.note".to_owned(),
        media_type: "text/plain".to_owned(),
        bytes: b"signed".to_vec(),
        annotations: [].into(),
    };
    connect(&reference, &identity).attach(&image.digest, &artifact, &quiet).unwrap();
    assert!(tokens.asked()[before..].iter().all(|one| one.method == Method::Post), "{:?}", tokens.asked());
    let stale = json!({"auths": {&host: {"identitytoken": "stale"}}});
    let stale = with_auth_file(&settings, room.folder.path(), &stale);
    let error = connect(&reference, &stale).push(&layout.folder, &quiet).unwrap_err();
    assert!(matches!(error, Error::Unauthorized { shown: true, .. }), "{error:?}");
}

#[test]
fn tokens_that_have_ended_are_renewed() {
    let (room, settings) = settings();
    // The first one ended long ago, whatever the server says, and the registry does not take it.
    let life = |nth| if nth == 0 { (300, -500) } else { (300, 300) };
    let Some(tokens) = Tokens::start(room.folder.path(), life) else { return };
    let Some(registry) = tokens.registry() else { return };
    let (layout, image) = image(&room.path("image"), 530, &[1000, 2000]);
    let reference = registry.reference("fixture");
    let known = with_auth_file(&settings, room.folder.path(), &password_for(reference.host(), PASSWORD));
    assert_eq!(connect(&reference, &known).push(&layout.folder, &quiet).unwrap().digest, image.digest);
    assert_eq!(tokens.asked().len(), 2);

    // Ones that last no time at all are had anew for each request, and none is used after its end.
    let folder = room.path("second");
    std::fs::create_dir(&folder).unwrap();
    let tokens = Tokens::start(&folder, |_| (0, 300)).unwrap();
    let registry = tokens.registry().unwrap();
    let reference = registry.reference("fixture");
    let known = with_auth_file(&settings, room.folder.path(), &password_for(reference.host(), PASSWORD));
    assert_eq!(connect(&reference, &known).push(&layout.folder, &quiet).unwrap().digest, image.digest);
    assert!(tokens.asked().len() > 5, "{}", tokens.asked().len());

    // A registry that takes none is given up.
    let folder = room.path("third");
    std::fs::create_dir(&folder).unwrap();
    let tokens = Tokens::start(&folder, |_| (300, -500)).unwrap();
    let registry = tokens.registry().unwrap();
    let reference = registry.reference("fixture");
    let known = with_auth_file(&settings, room.folder.path(), &password_for(reference.host(), PASSWORD));
    let error = connect(&reference, &known).push(&layout.folder, &quiet).unwrap_err();
    assert!(matches!(error, Error::Unauthorized { shown: true, .. }), "{error:?}");
}

#[test]
fn challenges_that_make_no_sense_are_refused() {
    let Some(registry) = Registry::start(&Login::None) else { return };
    let (_room, settings) = settings();
    for (headers, said) in [
        ("", "known are Basic and Bearer"),
        ("www-authenticate: Negotiate\r\n", "known are Basic and Bearer"),
        ("www-authenticate: Bearer\r\n", "names no token server"),
        ("www-authenticate: Bearer realm=\"nowhere\"\r\n", "names no token server"),
        ("www-authenticate: Bearer realm=\"ftp://127.0.0.1/\"\r\n", "shown credentials without TLS"),
        ("www-authenticate: \"\"\"\r\n", "cannot be read"),
    ] {
        let proxy = Proxy::start(registry.port, move |_: &Seen| Fate::Status(401, headers));
        let through = reference(proxy.port, "a");
        let options = Options { plain_http: true, ..Options::default() };
        let Err(error) = Repository::connect(&through, &settings, options, &quiet) else {
            panic!("{headers} was taken");
        };
        assert!(error.to_string().contains(said), "{headers}: {error}");
    }
}

#[test]
fn tls_is_spoken_where_it_has_to_be_and_certificates_are_checked() {
    let (room, settings) = settings();
    let Some((key, certificate)) = key_pair(room.folder.path()) else { return };
    let Some(registry) = Registry::start(&Login::Tls(&certificate, &key)) else { return };
    let (layout, image) = image(&room.path("image"), 540, &[1000]);
    let reference = registry.reference("fixture");

    let pem = std::fs::read(&certificate).unwrap();
    let root = ureq::tls::Certificate::from_pem(&pem).unwrap();
    let network =
        Network { roots: Arc::new(vec![root]), patience: Duration::from_secs(5), ..settings.network.clone() };
    let trusting = Settings { network, ..settings.clone() };
    assert_eq!(connect(&reference, &trusting).push(&layout.folder, &quiet).unwrap().digest, image.digest);

    // What is begun over TLS goes on over TLS: uploads, and token servers.
    let login = Login::Tls(&certificate, &key);
    let registry = Registry::configured(&login, |config| {
        config["http"]["relativeurls"] = json!(false);
        config["http"]["host"] = json!("http://127.0.0.1:1");
    })
    .unwrap();
    let error = connect(&registry.reference("a"), &trusting).push(&layout.folder, &quiet).unwrap_err();
    assert!(error.to_string().contains("which is not over TLS"), "{error}");
    let token =
        json!({"realm": "http://127.0.0.1:1/", "service": "s", "issuer": "i", "rootcertbundle": certificate});
    let registry = Registry::configured(&login, |config| config["auth"] = json!({"token": token})).unwrap();
    let Err(error) = Repository::connect(&registry.reference("a"), &trusting, Options::default(), &quiet)
    else {
        panic!("a token server without TLS was taken");
    };
    assert!(error.to_string().contains("shown credentials without TLS"), "{error}");

    // Nobody vouches for it here.
    let Err(error) = Repository::connect(&reference, &settings, Options::default(), &quiet) else {
        panic!("a certificate of nobody's was taken");
    };
    assert!(
        error.to_string().contains("https://127.0.0.1") && error.to_string().contains("certificate"),
        "{error}"
    );
    // Whoever insists on plain HTTP is told by the server that it is the wrong way.
    let options = Options { plain_http: true, ..Options::default() };
    let Err(error) = Repository::connect(&reference, &trusting, options, &quiet) else {
        panic!("not plain HTTP")
    };
    assert!(error.to_string().contains("has status 400"), "{error}");
}
