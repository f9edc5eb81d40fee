//! Connections that break, servers that are busy, and servers that lie: a proxy before a real registry, and servers that
//! were never one.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use serde_json::json;
use trainyard_builder::http;
use trainyard_builder::progress::Event;
use trainyard_builder::registry::{Error, Options, Repository};
use trainyard_builder::settings::Settings;
use trainyard_spec::Digest;
use trainyard_spec::image::Platform;

use super::parts::{
    Login, MANIFEST, PASSWORD, Registry, blobs, connect, image, password_for, quiet, reference, settings,
    with_auth_file,
};
use super::proxy::{Fate, Proxy, Seen};
use crate::server::{Answer, Server};

/// Pushes an image of one large layer through a proxy and expects it to arrive whole. Gives what the proxy saw.
fn push_through(
    size: usize,
    options: Options,
    fate: impl Fn(&Seen) -> Fate + Send + Sync + 'static,
) -> Option<(Proxy, Vec<Event>)> {
    let registry = Registry::start(&Login::None)?;
    let proxy = Proxy::start(registry.port, fate);
    let (room, settings) = settings();
    let (layout, image) = image(&room.path("image"), 100, &[size]);
    let options = Options { at_once: 1, ..options };
    let events = Mutex::new(Vec::new());
    let through = reference(proxy.port, "fixture");
    let repository = Repository::connect(&through, &settings, options, &quiet).unwrap();
    let pushed = repository.push(&layout.folder, &|event| events.lock().unwrap().push(event)).unwrap();
    assert_eq!(pushed.digest, image.digest);
    // Asked without the proxy, by a machine that has nothing.
    let elsewhere = Settings { cache: room.path("elsewhere"), ..settings };
    let pulled = connect(&registry.reference("fixture"), &elsewhere).pull(Platform::Amd64, &quiet).unwrap();
    assert!(blobs(&pulled.layout) == layout.blobs());
    Some((proxy, events.into_inner().unwrap()))
}

fn ranges(proxy: &Proxy) -> Vec<Option<String>> {
    let seen = proxy.seen();
    let patches = seen.iter().filter(|one| one.method == "PATCH");
    // The configuration is small, and sent in one piece.
    let large = patches.filter(|one| one.header("content-length").unwrap().len() > 4);
    large.map(|one| one.header("content-range").map(str::to_owned)).collect()
}

#[test]
fn a_blob_goes_in_one_request_and_else_in_pieces_in_order() {
    let Some((proxy, _)) = push_through(3_000_000, Options::default(), |_| Fate::Pass) else { return };
    assert_eq!(ranges(&proxy), [None]);
    let pieces = Options { chunk: 1 << 20, ..Options::default() };
    let (proxy, _) = push_through(3_000_000, pieces, |_| Fate::Pass).unwrap();
    let starts: Vec<String> = ranges(&proxy)
        .into_iter()
        .map(|range| range.unwrap().split('-').next().unwrap().to_owned())
        .collect();
    assert_eq!(starts, ["0", "1048576", "2097152"]);
}

#[test]
fn an_upload_whose_connection_breaks_is_gone_on_with() {
    // The second piece breaks off before the registry has any of it; what was there stays there.
    let pieces = || Options { chunk: 1 << 20, ..Options::default() };
    let fate = |seen: &Seen| match seen.header("content-range") {
        Some(range) if range.starts_with("1048576-") && seen.nth < 4 => Fate::Lost(300_000),
        _ => Fate::Pass,
    };
    let Some((proxy, events)) = push_through(3_000_000, pieces(), fate) else { return };
    let starts: Vec<_> = ranges(&proxy).into_iter().map(Option::unwrap).collect();
    assert!(starts.len() > 3, "{starts:?}");
    assert_eq!(starts.iter().filter(|range| range.starts_with("0-")).count(), 1, "{starts:?}");
    assert!(proxy.count("GET", "/uploads/") >= 1, "the registry is asked how much it has");
    assert_eq!(proxy.count("POST", "/uploads/"), 2, "one upload for each blob");
    assert!(events.iter().any(|event| matches!(event, Event::Retrying { .. })), "{events:?}");
}

#[test]
fn what_the_registry_has_of_a_broken_upload_is_not_sent_again() {
    // Twice, and each time it gets further.
    let fate = |seen: &Seen| match seen.header("content-length") {
        Some(length) if seen.method == "PATCH" && length.len() > 4 && seen.nth < 3 => Fate::Kept(1_100_000),
        _ => Fate::Pass,
    };
    let Some((proxy, _)) = push_through(3_000_000, Options::default(), fate) else { return };
    let starts: Vec<_> = ranges(&proxy)
        .into_iter()
        .map(|range| range.map(|range| range.split('-').next().unwrap().to_owned()))
        .collect();
    let at = |bytes: &str| Some(bytes.to_owned());
    let few = [None, at("1100000"), at("2200000")];
    assert!(starts == few || starts == few[..2], "{starts:?}");
    assert_eq!(proxy.count("POST", "/uploads/"), 2, "one upload for each blob");
}

#[test]
fn an_upload_that_the_registry_gives_up_is_begun_again() {
    // docker-registry forgets an upload whose connection breaks while it receives.
    let fate = |seen: &Seen| match seen.header("content-length") {
        Some(length) if seen.method == "PATCH" && length.len() > 4 && seen.nth < 2 => Fate::Broken(1_500_000),
        _ => Fate::Pass,
    };
    let Some((proxy, _)) = push_through(3_000_000, Options::default(), fate) else { return };
    assert!(ranges(&proxy).len() >= 2, "{:?}", ranges(&proxy));
    assert!(proxy.count("POST", "/uploads/") >= 3, "a new upload");

    // The answer to the last request is lost; the blob is there, and found to be.
    let fate =
        |seen: &Seen| if seen.is("PUT", "/uploads/") && seen.nth < 2 { Fate::Unanswered } else { Fate::Pass };
    let (proxy, _) = push_through(100_000, Options::default(), fate).unwrap();
    assert_eq!(proxy.count("PATCH", "/uploads/"), 2, "no blob is sent twice");
    assert_eq!(proxy.count("PUT", "/uploads/"), 2);
}

#[test]
fn busy_and_failing_servers_are_asked_again_no_sooner_than_they_say() {
    let start = Instant::now();
    let fate = |seen: &Seen| match (seen.method.as_str(), seen.nth) {
        ("HEAD", 0) | ("POST", 1) => Fate::Status(500, ""),
        ("PATCH", 0) => Fate::Status(503, ""),
        ("PUT", 0) => Fate::Status(429, "retry-after: 1\r\n"),
        ("PUT", 3) => Fate::Status(502, "retry-after: soon\r\n"),
        _ => Fate::Pass,
    };
    let Some((proxy, events)) = push_through(200_000, Options::default(), fate) else { return };
    assert!(start.elapsed() >= Duration::from_secs(1), "Retry-After is honoured");
    assert!(proxy.count("PUT", "/manifests/") >= 1);
    let retried = events.iter().filter(|event| matches!(event, Event::Retrying { .. })).count();
    assert!(retried >= 4, "{events:?}");
}

#[test]
fn a_proxy_that_takes_no_large_requests_gets_pieces() {
    let fate = |seen: &Seen| {
        let length = seen.header("content-length").map_or(0, |length| length.parse().unwrap());
        if length > 17_000_000_u64 { Fate::Status(413, "") } else { Fate::Pass }
    };
    let Some((proxy, _)) = push_through(20 << 20, Options::default(), fate) else { return };
    let starts =
        ranges(&proxy).into_iter().flatten().map(|range| range.split('-').next().unwrap().to_owned());
    assert_eq!(starts.collect::<Vec<_>>(), ["0", "16777216"]);
}

#[test]
fn a_server_that_goes_on_failing_is_given_up_soon_and_named() {
    let Some(registry) = Registry::start(&Login::None) else { return };
    let (room, settings) = settings();
    let (layout, _) = image(&room.path("image"), 200, &[100_000, 200_000, 300_000]);
    for (fate, part, least, most) in [
        (Fate::Status(500, ""), "answered with status 500", 4, 4 * 4),
        (Fate::Lost(0), "could not be read", 4, 4 * 4),
        (Fate::Status(403, ""), "answered with status 403", 1, 4),
    ] {
        let given = fate.clone();
        let proxy =
            Proxy::start(
                registry.port,
                move |seen| if seen.method == "PATCH" { given.clone() } else { Fate::Pass },
            );
        let through = reference(proxy.port, "never");
        let error = connect(&through, &settings).push(&layout.folder, &quiet).unwrap_err();
        let said = error.to_string();
        assert!(said.contains(part) && said.contains(&proxy.port.to_string()), "{fate:?}: {said}");
        assert!(!said.contains("_state"), "an upload's address lets its bearer in: {said}");
        let asked = proxy.count("PATCH", "");
        assert!((least..=most).contains(&asked), "{fate:?}: {asked}");
    }
    let error = connect(&registry.reference("never"), &settings).pull(Platform::Amd64, &quiet).unwrap_err();
    assert!(matches!(error, Error::Refused { status: 404, .. }), "{error:?}");
}

#[test]
fn a_registry_that_has_something_else_than_was_pushed_is_told() {
    let Some(registry) = Registry::start(&Login::None) else { return };
    let (room, settings) = settings();
    let (layout, _) = image(&room.path("image"), 250, &[1000]);
    let other =
        "docker-content-digest: sha256:44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a\r\n";
    // It says another digest; or it says none, and does not have it.
    for (headers, said) in [(other, "found \"sha256:44136fa3"), ("", "answered with status 404")] {
        let proxy = Proxy::start(registry.port, move |seen| {
            if seen.is("PUT", "/manifests/") { Fate::Status(201, headers) } else { Fate::Pass }
        });
        let error = connect(&reference(proxy.port, "a"), &settings).push(&layout.folder, &quiet).unwrap_err();
        assert!(error.to_string().contains(said), "{headers}: {error}");
    }
}

/// Pulls an image of two layers through a proxy.
fn pull_through(
    size: usize,
    fate: impl Fn(&Seen) -> Fate + Send + Sync + 'static,
) -> Option<(Proxy, Result<(), Error>)> {
    let registry = Registry::start(&Login::None)?;
    let (room, settings) = settings();
    let (layout, _) = image(&room.path("image"), 300, &[size, 10]);
    connect(&registry.reference("fixture"), &settings).push(&layout.folder, &quiet).unwrap();
    let proxy = Proxy::start(registry.port, fate);
    let elsewhere = Settings { cache: room.path("elsewhere"), ..settings };
    let repository = connect(&reference(proxy.port, "fixture"), &elsewhere);
    let result = repository.pull(Platform::Amd64, &quiet);
    let result = result.map(|pulled| assert!(blobs(&pulled.layout) == layout.blobs()));
    let store = elsewhere.cache.join("blobs/sha256");
    for entry in std::fs::read_dir(store).into_iter().flatten() {
        let entry = entry.unwrap();
        let found = Digest::of(&std::fs::read(entry.path()).unwrap());
        assert_eq!(found.hex(), entry.file_name().into_string().unwrap(), "only what is verified is kept");
    }
    if result.is_err() {
        let images = elsewhere.cache.join("images");
        assert!(!images.exists() || std::fs::read_dir(images).unwrap().next().is_none(), "no half image");
    }
    Some((proxy, result))
}

#[test]
fn a_download_whose_connection_breaks_is_gone_on_with() {
    let large = |seen: &Seen| seen.is("GET", "/blobs/") && seen.header("range").is_none();
    // Each connection breaks after 2 MB: more often than a failure is tried again, and each time it got further.
    let fate = |seen: &Seen| if seen.is("GET", "/blobs/") { Fate::Cut(2_000_000) } else { Fate::Pass };
    let Some((proxy, result)) = pull_through(13_000_000, fate) else { return };
    result.unwrap();
    let seen = proxy.seen();
    let mut from: Vec<u64> = seen
        .iter()
        .filter_map(|one| one.header("range")?.strip_prefix("bytes=")?.strip_suffix('-')?.parse().ok())
        .collect();
    from.sort_unstable();
    let expected: Vec<u64> = (1..=6).map(|part| part * 2_000_000).collect();
    assert_eq!(from, expected);
    assert_eq!(seen.iter().filter(|one| large(one)).count(), 3, "each blob from its beginning once");

    // Without getting further it is given up.
    let fate = |seen: &Seen| if seen.is("GET", "/blobs/") { Fate::Cut(5) } else { Fate::Pass };
    let (_, result) = pull_through(100_000, fate).unwrap();
    let error = result.unwrap_err();
    assert!(matches!(error, Error::Http(http::Error::Body { .. })), "{error:?}");
}

#[test]
fn bytes_that_are_not_the_ones_asked_for_are_refused() {
    let fate = |seen: &Seen| if seen.is("GET", "/blobs/") { Fate::Changed(1) } else { Fate::Pass };
    let Some((_, result)) = pull_through(100_000, fate) else { return };
    let error = result.unwrap_err();
    assert!(matches!(error, Error::Differs { .. }), "{error:?}");
    assert!(error.to_string().contains(" bytes with sha256:"), "{error}");

    let fate = |seen: &Seen| if seen.is("GET", "/manifests/") { Fate::Changed(3) } else { Fate::Pass };
    let (_, result) = pull_through(100, fate).unwrap();
    assert!(matches!(result.unwrap_err(), Error::Differs { .. }));
}

/// A server that answers `/v2/` as a registry does, and else as it is told.
fn pretend(answer: impl Fn(&str) -> Answer + Send + Sync + 'static) -> (Server, u16) {
    let server = Server::start(move |path, _| match path {
        "/v2/" => Answer::Body("application/json", b"{}".to_vec()),
        path => answer(path),
    });
    let port = server.url("").rsplit(':').next().unwrap().parse().unwrap();
    (server, port)
}

fn pull_from(port: u16) -> Error {
    let (_room, settings) = settings();
    connect(&reference(port, "a:1"), &settings).pull(Platform::Amd64, &quiet).unwrap_err()
}

#[test]
fn documents_that_no_registry_should_serve_are_refused() {
    let layer = json!({"mediaType": "application/vnd.oci.image.layer.v1.tar", "digest": Digest::of(b"abc"), "size": 2});
    let config = json!({"mediaType": "application/vnd.oci.image.config.v1+json", "digest": Digest::of(b"{}"), "size": 2});
    let manifest = |layers: serde_json::Value| {
        json!({"schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": layers})
            .to_string()
            .into_bytes()
    };
    let unknown = layer.to_string().replace("sha256:", "md5:");
    let unknown: serde_json::Value = serde_json::from_str(&unknown).unwrap();
    let shorter = json!({"mediaType": layer["mediaType"], "digest": layer["digest"], "size": 900});
    let endless = |text: &str| json!({"mediaType": layer["mediaType"], "digest": Digest::of(text.as_bytes()), "size": u64::MAX});
    for (document, said) in [
        (vec![b' '; (4 << 20) + 1], "more than the 4194304 bytes"),
        (b"<html>".to_vec(), "expected value"),
        (b"{}".to_vec(), "known are image manifests and indexes"),
        (
            br#"{"schemaVersion":1,"mediaType":"application/vnd.docker.distribution.manifest.v1+json"}"#
                .to_vec(),
            "known are",
        ),
        (manifest(json!([unknown])), "md5"),
        // More bytes than the manifest says, which the digest would not tell before all have arrived.
        (manifest(json!([layer])), "more than the 2 bytes"),
        (manifest(json!([shorter])), "broke off after 3 bytes"),
        (manifest(json!([layer, shorter])), "two sizes"),
        (manifest(json!([endless("a"), endless("b")])), "broke off"),
        // All as it should be, but no image: the configuration is an empty object.
        (manifest(json!([])), "architecture"),
    ] {
        let served = document.clone();
        let (_server, port) = pretend(move |path| match path {
            "/v2/a/manifests/1" => Answer::Body("text/plain", served.clone()),
            path if path.ends_with(&Digest::of(b"{}").to_string()) => {
                Answer::Body("text/plain", b"{}".to_vec())
            }
            path if path.contains("/blobs/") => Answer::Body("text/plain", b"abc".to_vec()),
            _ => Answer::Status(404),
        });
        let error = pull_from(port);
        assert!(error.to_string().contains(said), "{said}: {error}");
    }
    // A manifest that is not the one whose digest was asked for.
    let (_server, port) = pretend(|_| Answer::Body(MANIFEST, b"{}".to_vec()));
    let (_room, settings) = settings();
    let asked = reference(port, &format!("a@{}", Digest::of(b"asked")));
    let error = connect(&asked, &settings).pull(Platform::Amd64, &quiet).unwrap_err();
    assert!(matches!(error, Error::Differs { .. }), "{error:?}");
}

#[test]
fn what_is_no_registry_is_told_so() {
    let (_room, settings) = settings();
    let server = Server::start(|_, _| Answer::Status(404));
    let port = server.url("").rsplit(':').next().unwrap().parse().unwrap();
    let Err(error) = Repository::connect(&reference(port, "a"), &settings, Options::default(), &quiet) else {
        panic!("a server without /v2/ is no registry");
    };
    assert!(error.to_string().contains("has status 404; a registry has 200 or 401 there"), "{error}");
}

#[test]
fn redirects_carry_no_credentials_and_end_somewhere() {
    let Some(registry) = Registry::start(&Login::Basic) else { return };
    let (room, settings) = settings();
    let (layout, image) = image(&room.path("image"), 400, &[50_000]);
    let host = format!("127.0.0.1:{}", registry.port);
    let known = with_auth_file(&settings, room.folder.path(), &password_for(&host, PASSWORD));
    connect(&registry.reference("fixture"), &known).push(&layout.folder, &quiet).unwrap();

    // Blobs are elsewhere, as they are at registries that keep them in object storage.
    let all = layout.blobs();
    let storage = Server::start(move |path, _| {
        let hex = path.split(['/', '?']).nth(1).unwrap_or_default();
        let blob = all.iter().find(|(name, _)| name == hex);
        blob.map_or(Answer::Status(404), |(_, bytes)| Answer::Body("application/octet-stream", bytes.clone()))
    });
    let to = storage.url("/");
    let proxy = Proxy::start(registry.port, move |seen| match seen.path.split_once("/blobs/sha256:") {
        Some((_, hex)) if seen.method == "GET" => Fate::Elsewhere(format!("{to}{hex}?signature=secret")),
        _ => Fate::Pass,
    });
    let through = format!("127.0.0.1:{}", proxy.port);
    let known = with_auth_file(&settings, room.folder.path(), &password_for(&through, PASSWORD));
    let pulled = connect(&reference(proxy.port, "fixture"), &known).pull(Platform::Amd64, &quiet).unwrap();
    assert_eq!(pulled.digest, image.digest);
    assert!(blobs(&pulled.layout) == layout.blobs());
    assert!(proxy.seen().iter().any(|one| one.is("GET", "/blobs/") && one.header("authorization").is_some()));
    assert_eq!(storage.seen().len(), 2);
    assert!(storage.seen().iter().all(|one| one.authorization.is_none()), "{:?}", storage.seen());

    // Storage that fails is named without the signature.
    let gone = Proxy::start(registry.port, {
        let to = storage.url("/gone?signature=secret");
        move |seen| if seen.is("GET", "/blobs/") { Fate::Elsewhere(to.clone()) } else { Fate::Pass }
    });
    let elsewhere = Settings { cache: room.path("elsewhere"), ..settings.clone() };
    let through = format!("127.0.0.1:{}", gone.port);
    let known = with_auth_file(&elsewhere, room.folder.path(), &password_for(&through, PASSWORD));
    let error = connect(&reference(gone.port, "fixture"), &known).pull(Platform::Amd64, &quiet).unwrap_err();
    assert!(error.to_string().contains("/gone") && !error.to_string().contains("secret"), "{error}");

    for (to, said) in [
        ("/v2/fixture/blobs/round", "redirects more than 5 times"),
        ("file:///etc/passwd", "neither HTTPS nor HTTP"),
        ("ftp://127.0.0.1/x", "neither HTTPS nor HTTP"),
    ] {
        let proxy = Proxy::start(registry.port, move |seen| match seen.method.as_str() {
            "GET" if seen.path.contains("/blobs/") => Fate::Elsewhere(to.to_owned()),
            _ => Fate::Pass,
        });
        let through = format!("127.0.0.1:{}", proxy.port);
        let known = with_auth_file(&elsewhere, room.folder.path(), &password_for(&through, PASSWORD));
        let error =
            connect(&reference(proxy.port, "fixture"), &known).pull(Platform::Amd64, &quiet).unwrap_err();
        assert!(error.to_string().contains(said), "{to}: {error}");
    }
}
