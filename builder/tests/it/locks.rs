//! Locking and fetching against a real server.

use trainyard_builder::corpus::{self, Source};
use trainyard_builder::index::FindLinks;
use trainyard_builder::{index, input, lock};
use trainyard_spec::Digest;
use trainyard_spec::lock::LockedInput;

use crate::room::{Room, sdist};
use crate::server::{Answer, Server, project};

const TEXTS: [(&str, &[u8]); 3] =
    [("texts/b.txt", b"second"), ("texts/a.txt", "erste\u{e9}\n".as_bytes()), ("other/c.txt", b"left out")];

fn index_error(error: &lock::Error) -> &index::Error {
    match error {
        lock::Error::Input { source, .. } => match source.as_ref() {
            input::Error::Index(error) => error,
            other => panic!("{other:?}"),
        },
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_corpus_is_locked_fetched_and_joined_in_order() {
    let archive = sdist(&TEXTS);
    let server = Server::of_demo(archive.clone());
    let mut room = Room::new(&[&server.index()]);
    let manifest = room.corpus_manifest("");
    assert!(matches!(room.corpus(&manifest), Err(corpus::Error::Lock(lock::Error::Missing { .. }))));

    let locked = room.lock(&manifest).unwrap();
    let Some(LockedInput::Python { file, .. }) = locked.input.values().next() else { panic!("{locked:?}") };
    assert_eq!((file.size, file.sha256), (archive.len() as u64, Digest::of(&archive)));
    let written = std::fs::read_to_string(lock::path(&manifest)).unwrap();
    assert!(!written.contains("http"), "a lock names no address:\n{written}");

    let made = room.corpus(&manifest).unwrap();
    assert_eq!(std::fs::read_to_string(&made.text).unwrap(), "ersteé\nsecond\n");
    assert_eq!((made.bytes, made.source.clone()), (15, Source::Locked));
    let golden = "sha256:0c17b25e64c4f310d5409ad4ad4b797b8c9ba9e891600a754ba95d2752f02e94";
    assert_eq!(made.digest.to_string(), golden, "the text depends on nothing but the inputs");
    assert_eq!(server.count("/files/demo-1.0.tar.gz"), 1, "what was locked is not fetched again");

    room.settings.offline = true;
    assert_eq!(room.corpus(&manifest).unwrap(), made);
    assert_eq!(room.leftovers(), Vec::<std::ffi::OsString>::new());
}

#[test]
fn a_lock_of_other_inputs_is_refused_and_comments_do_not_count() {
    let server = Server::of_demo(sdist(&TEXTS));
    let room = Room::new(&[&server.index()]);
    let manifest = room.corpus_manifest("");
    room.lock(&manifest).unwrap();
    let text = std::fs::read_to_string(&manifest).unwrap();
    std::fs::write(&manifest, format!("# a comment\n{text}")).unwrap();
    room.corpus(&manifest).unwrap();
    std::fs::write(&manifest, text.replace("\"1.0\"", "\"1.1\"")).unwrap();
    let error = room.corpus(&manifest).unwrap_err();
    assert!(matches!(error, corpus::Error::Lock(lock::Error::Stale { .. })), "{error:?}");
    assert_eq!(error.hint(), Some(format!("trainyard lock {}", manifest.display())));
}

#[test]
fn html_indexes_redirects_and_folders_serve_too() {
    let archive = sdist(&TEXTS);
    let hex = Digest::of(&archive).hex();
    let html = format!(
        "<!DOCTYPE html><html><body><a href=\"/moved#sha256={hex}\">x</a><a href=\"/f/demo-1.0.tar.gz#sha256={hex}\">demo-1.0.tar.gz</a></body></html>"
    );
    let body = archive.clone();
    let server = Server::start(move |path, _| match path {
        "/simple/demo/" => Answer::Body("text/html", html.clone().into_bytes()),
        "/f/demo-1.0.tar.gz" => Answer::Redirect("/elsewhere".to_owned()),
        "/elsewhere" => Answer::Body("application/gzip", body.clone()),
        _ => Answer::Status(404),
    });
    let room = Room::new(&[&server.index()]);
    let manifest = room.corpus_manifest("");
    let from_html = room.lock(&manifest).unwrap();

    let mut room = Room::new(&[]);
    let manifest = room.corpus_manifest("");
    std::fs::write(room.path("demo-1.0.tar.gz"), &archive).unwrap();
    room.settings.index.python.find_links = vec![FindLinks::Folder(room.folder.path().to_owned())];
    room.settings.index.python.no_index = true;
    assert_eq!(room.lock(&manifest).unwrap(), from_html);
    room.corpus(&manifest).unwrap();
}

#[test]
fn credentials_are_sent_and_never_shown() {
    let server = Server::start(|path, _| match path {
        "/simple/demo/" => Answer::Body("application/json", project(&"0".repeat(64))),
        _ => Answer::Status(401),
    });
    let room = Room::new(&[&server.index_for("me", "s%40cret")]);
    let manifest = room.corpus_manifest("");
    let error = room.lock(&manifest).unwrap_err();
    let shown = format!("{error} {error:?} {:?} {:?}", room.settings, room.events.borrow());
    assert!(!shown.contains("cret"), "{shown}");
    for seen in server.seen() {
        // "me:s@cret"
        assert_eq!(seen.authorization.as_deref(), Some("Basic bWU6c0BjcmV0"), "{}", seen.path);
    }
    assert_eq!(server.seen().len(), 2);
}

#[test]
fn credentials_stay_with_their_host() {
    let archive = sdist(&TEXTS);
    let elsewhere = Server::of_demo(archive.clone());
    let (page, file) = (elsewhere.index_for("you", "hidden"), elsewhere.url("/files/demo-1.0.tar.gz"));
    let senseless = Server::start(|_, _| Answer::Body("application/json", b"<html>".to_vec()));
    let unreadable = senseless.url("/page").replace("//", "//you:hidden@");
    let hex = Digest::of(&archive).hex();
    for (redirected, to, works) in [
        ("/simple/demo/", format!("{page}/demo/"), true),
        ("/files/demo-1.0.tar.gz", file, true),
        // An error names the page that was reached.
        ("/simple/demo/", unreadable, false),
    ] {
        let hex = hex.clone();
        let server = Server::start(move |path, _| match path {
            path if path == redirected => Answer::Redirect(to.clone()),
            _ => Answer::Body("application/json", project(&hex)),
        });
        let room = Room::new(&[&server.index_for("me", "secret")]);
        let made = room.lock(&room.corpus_manifest(""));
        assert_eq!(made.is_ok(), works, "{made:?}");
        let said = made.as_ref().err().map(ToString::to_string);
        let shown = format!("{said:?} {made:?} {:?} {:?}", room.settings, room.events.borrow());
        assert!(!shown.contains("secret") && !shown.contains("hidden"), "{shown}");
        assert!(server.seen().iter().all(|seen| seen.authorization.is_some()));
    }
    let mine = "Basic bWU6c2VjcmV0";
    assert!(elsewhere.seen().iter().all(|seen| seen.authorization.as_deref() != Some(mine)));
    assert!(elsewhere.count("/files/demo-1.0.tar.gz") > 0);
}

#[test]
fn a_place_that_has_the_file_is_enough() {
    let archive = sdist(&TEXTS);
    let good = Server::of_demo(archive.clone());
    let down = Server::start(|_, _| Answer::Status(500));
    let other = Server::of_demo(sdist(&[("texts/a.txt", b"another file of this name")]));
    let room = Room::new(&[&good.index()]);
    let manifest = room.corpus_manifest("");
    let locked = room.lock(&manifest).unwrap();
    let made = room.corpus(&manifest).unwrap();

    // What is locked is the same wherever it comes from.
    for before in [&down, &other] {
        let elsewhere = Room::new(&[&before.index(), &good.index()]);
        let copy = elsewhere.corpus_manifest("");
        std::fs::copy(lock::path(&manifest), lock::path(&copy)).unwrap();
        assert_eq!(elsewhere.corpus(&copy).unwrap().digest, made.digest);
    }
    // But what gets locked is not left to the places that happen to be up.
    let mut strict = Room::new(&[&down.index(), &good.index()]);
    let manifest = strict.corpus_manifest("");
    assert!(matches!(index_error(&strict.lock(&manifest).unwrap_err()), index::Error::Http(_)));
    // A folder comes before every index, and then none is asked.
    std::fs::write(strict.path("demo-1.0.tar.gz"), &archive).unwrap();
    strict.settings.index.python.find_links = vec![FindLinks::Folder(strict.folder.path().to_owned())];
    let asked = down.seen().len();
    assert_eq!(strict.lock(&manifest).unwrap(), locked);
    assert_eq!(down.seen().len(), asked);
}

#[test]
fn failures_that_pass_are_tried_again() {
    let archive = sdist(&TEXTS);
    let hex = Digest::of(&archive).hex();
    let server = Server::start(move |path, before| match (path, before) {
        ("/simple/demo/", 0) => Answer::Status(503),
        ("/simple/demo/", 1) => Answer::Status(429),
        ("/simple/demo/", _) => Answer::Body("application/json", project(&hex)),
        ("/files/demo-1.0.tar.gz", 0) => {
            Answer::Broken { says: archive.len(), sends: archive[..40].to_vec() }
        }
        ("/files/demo-1.0.tar.gz", 1) => Answer::Status(500),
        ("/files/demo-1.0.tar.gz", _) => Answer::Body("application/gzip", archive.clone()),
        _ => Answer::Status(404),
    });
    let room = Room::new(&[&server.index()]);
    let manifest = room.corpus_manifest("");
    room.lock(&manifest).unwrap();
    assert_eq!(server.count("/files/demo-1.0.tar.gz"), 3);
    let retries =
        room.events.borrow().iter().filter(|event| format!("{event:?}").contains("Retrying")).count();
    assert_eq!(retries, 4);
}

#[test]
fn servers_that_fail_are_named() {
    for (status, requests) in [(500, 4), (401, 1)] {
        let server = Server::start(move |_, _| Answer::Status(status));
        let room = Room::new(&[&server.index()]);
        let error = room.lock(&room.corpus_manifest("")).unwrap_err();
        let said = error.to_string();
        assert!(said.contains(&server.url("/simple/demo/")) && said.contains(&status.to_string()), "{said}");
        assert_eq!(server.seen().len(), requests, "status {status}");
    }
    let server = Server::start(|_, _| Answer::Status(404));
    let room = Room::new(&[&server.index()]);
    let error = room.lock(&room.corpus_manifest("")).unwrap_err();
    assert!(matches!(index_error(&error), index::Error::NotFound { .. }), "{error:?}");

    let server = Server::start(|_, _| Answer::Body("application/json", b"<html>".to_vec()));
    let room = Room::new(&[&server.index()]);
    let error = room.lock(&room.corpus_manifest("")).unwrap_err();
    assert!(matches!(index_error(&error), index::Error::Page { .. }), "{error:?}");

    // Nobody listens on a port that a server has just given up.
    let gone = Server::start(|_, _| Answer::Status(404)).index();
    let room = Room::new(&[&gone]);
    let error = room.lock(&room.corpus_manifest("")).unwrap_err();
    assert!(index_error(&error).is_out_of_reach(), "{error:?}");
}

#[test]
fn a_damaged_download_names_what_was_expected_and_found() {
    let archive = sdist(&TEXTS);
    let mut damaged = archive.clone();
    damaged[50] ^= 1;
    let (hex, served) = (Digest::of(&archive).hex(), damaged.clone());
    let server = Server::start(move |path, _| match path {
        "/simple/demo/" => Answer::Body("application/json", project(&hex)),
        _ => Answer::Body("application/gzip", served.clone()),
    });
    let room = Room::new(&[&server.index()]);
    let said = room.lock(&room.corpus_manifest("")).unwrap_err().to_string();
    for part in ["demo-1.0.tar.gz", &Digest::of(&archive).to_string(), &Digest::of(&damaged).to_string()] {
        assert!(said.contains(part), "{said}");
    }
    assert_eq!(room.leftovers(), Vec::<std::ffi::OsString>::new());
}

#[test]
fn a_file_that_was_replaced_after_it_was_locked_is_refused() {
    let first = sdist(&TEXTS);
    let server = Server::of_demo(first.clone());
    let room = Room::new(&[&server.index()]);
    let manifest = room.corpus_manifest("\"*.toml\"");
    room.lock(&manifest).unwrap();
    let lock_text = std::fs::read(lock::path(&manifest)).unwrap();

    let second = sdist(&[("texts/a.txt", b"replaced")]);
    for says_so in [true, false] {
        let hex = Digest::of(if says_so { &second } else { &first }).hex();
        let body = second.clone();
        let server = Server::start(move |path, _| match path {
            "/simple/demo/" => Answer::Body("application/json", project(&hex)),
            _ => Answer::Body("application/gzip", body.clone()),
        });
        let other = Room::new(&[&server.index()]);
        let manifest = other.corpus_manifest("\"*.toml\"");
        std::fs::write(lock::path(&manifest), &lock_text).unwrap();
        // A tampered input never falls back to other text.
        let error = other.corpus(&manifest).unwrap_err();
        let corpus::Error::Input(error) = error else { panic!("{error:?}") };
        assert!(!error.is_out_of_reach());
        match (says_so, &error) {
            (true, input::Error::Index(index::Error::Changed { .. } | index::Error::Http(_))) => {}
            (false, input::Error::Store(_) | input::Error::Index(index::Error::Http(_))) => {}
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn without_any_index_the_fallback_stands_in_and_says_why() {
    let server = Server::of_demo(sdist(&TEXTS));
    let online = Room::new(&[&server.index()]);
    let manifest = online.corpus_manifest("\"own/*.txt\"");
    online.lock(&manifest).unwrap();

    let room = Room::new(&[]);
    let own = room.corpus_manifest("\"own/*.txt\"");
    std::fs::copy(lock::path(&manifest), lock::path(&own)).unwrap();
    let error = room.corpus(&own).unwrap_err();
    assert!(matches!(error, corpus::Error::Read { .. } | corpus::Error::Empty { .. }), "{error:?}");
    std::fs::create_dir(room.path("own")).unwrap();
    std::fs::write(room.path("own/b.txt"), "b").unwrap();
    std::fs::write(room.path("own/a.txt"), "a\n").unwrap();
    // Without ** a pattern reaches no deeper than it says.
    std::fs::create_dir(room.path("own/deep")).unwrap();
    std::fs::write(room.path("own/deep/c.txt"), "c\n").unwrap();
    let made = room.corpus(&own).unwrap();
    assert_eq!(std::fs::read_to_string(&made.text).unwrap(), "a\nb\n");
    let Source::Fallback { reason } = made.source else { panic!("{made:?}") };
    assert!(reason.contains("no index of Python packages is configured"), "{reason}");

    let mut forbidden = Room::new(&[&online.settings.index.python.indexes[0].to_string()]);
    forbidden.settings.index.python.no_index = true;
    let error = forbidden.lock(&forbidden.corpus_manifest("")).unwrap_err();
    assert!(error.to_string().contains("says no-index"), "{error}");

    let strict = room.corpus_manifest("");
    let error = room.corpus(&strict).unwrap_err();
    assert!(error.hint().unwrap().contains("PIP_INDEX_URL"), "{error:?}");
}

#[test]
fn texts_that_are_no_text_are_refused() {
    for (texts, expect) in [
        (vec![("texts/a.txt", b"ok \xff".as_slice())], "a.txt is not UTF-8 text: byte 3"),
        (vec![("other/a.txt", b"x".as_slice())], "no file matches */texts/*.txt"),
    ] {
        let server = Server::of_demo(sdist(&texts));
        let room = Room::new(&[&server.index()]);
        let manifest = room.corpus_manifest("");
        room.lock(&manifest).unwrap();
        let said = room.corpus(&manifest).unwrap_err().to_string();
        assert!(said.contains(expect), "{said}");
    }
}

#[test]
fn every_fault_of_a_manifest_is_told_by_the_kind_it_is_nearer_to() {
    let room = Room::new(&[]);
    let manifest = room.corpus_manifest("");
    let text = std::fs::read_to_string(&manifest).unwrap();
    std::fs::write(&manifest, text.replace("include =", "inclde =")).unwrap();
    let said = room.lock(&manifest).unwrap_err().to_string();
    assert!(said.contains("inclde"), "{said}");
    assert!(!said.contains("platform"), "{said}");
}
