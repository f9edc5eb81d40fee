//! Images to and from a real registry, and what skopeo and Podman make of them there.

mod faults;
mod login;
pub(crate) mod parts;
mod proxy;
mod referrers;

use std::cell::RefCell;
use std::path::Path;

use serde_json::json;
use trainyard_builder::oci;
use trainyard_builder::progress::Event;
use trainyard_builder::registry::{Error, Pushed, Repository};
use trainyard_builder::settings::Settings;
use trainyard_spec::Digest;
use trainyard_spec::image::Platform;

use self::parts::{INDEX, Layout, Login, Registry, blobs, connect, image, noise, quiet, settings, tool};
use self::proxy::{Fate, Proxy};

fn skopeo_copy(from: &str, to: &str, more: &[&str]) -> Option<String> {
    let arguments = ["copy", "--quiet", "--src-tls-verify=false", "--dest-tls-verify=false"];
    tool("skopeo", &[&arguments[..], more, &[from, to]].concat())
}

#[test]
fn an_image_comes_back_as_it_was_and_is_sent_and_fetched_once() {
    let Some(registry) = Registry::start(&Login::None) else { return };
    let (room, settings) = settings();
    let (layout, image) = image(&room.path("image"), 1, &[3_000_000, 10, 0, 500_000, 10]);
    let reference = registry.reference("team/fixture:1.0");

    let events = RefCell::new(Vec::new());
    let repository = connect(&reference, &settings);
    let pushed = repository.push(&layout.folder, &|event| events.borrow_mut().push(event)).unwrap();
    let size: u64 = layout.blobs().iter().map(|(_, bytes)| bytes.len() as u64).sum();
    let manifest = layout.folder.join("blobs/sha256").join(image.digest.hex()).metadata().unwrap().len();
    let sent = size - manifest;
    assert_eq!(pushed, Pushed { digest: image.digest, sent, uploaded: 6, present: 0, mounted: 0 });
    let last = events.borrow().iter().rev().find(|event| matches!(event, Event::Uploading { .. })).cloned();
    assert_eq!(last, Some(Event::Uploading { to: reference.to_string(), sent, size: sent }));
    let again = repository.push(&layout.folder, &quiet).unwrap();
    assert_eq!(again, Pushed { sent: 0, uploaded: 0, present: 6, ..pushed });

    // By tag, by digest, and by both, into a machine that has nothing.
    for rest in [
        "team/fixture:1.0".to_owned(),
        format!("team/fixture@{}", image.digest),
        format!("team/fixture:1.0@{}", image.digest),
    ] {
        let elsewhere = Settings {
            cache: room.path("elsewhere").join(Digest::of(rest.as_bytes()).short()),
            ..settings.clone()
        };
        let repository = connect(&registry.reference(&rest), &elsewhere);
        let pulled = repository.pull(Platform::Amd64, &quiet).unwrap();
        assert_eq!((pulled.digest, pulled.fetched), (image.digest, sent), "{rest}");
        assert!(blobs(&pulled.layout) == layout.blobs(), "{rest}");
        let opened = oci::Layout::open(&pulled.layout).unwrap();
        assert_eq!(opened.digest, image.digest);
        assert_eq!(repository.pull(Platform::Amd64, &quiet).unwrap().fetched, 0);

        // What is damaged is fetched again, and nothing else is.
        let blob = elsewhere.cache.join("blobs/sha256").join(image.layers[3].hex());
        let whole = std::fs::read(&blob).unwrap();
        std::fs::remove_file(&blob).unwrap();
        std::fs::write(&blob, b"damaged").unwrap();
        assert_eq!(repository.pull(Platform::Amd64, &quiet).unwrap().fetched, whole.len() as u64);
        assert!(std::fs::read(&blob).unwrap() == whole);
    }

    let source = format!("docker://{reference}");
    let Some(raw) = tool("skopeo", &["inspect", "--raw", "--tls-verify=false", &source]) else { return };
    assert_eq!(Digest::of(raw.as_bytes()), image.digest);
    let copy = room.path("copy");
    skopeo_copy(&source, &format!("oci:{}:x", copy.display()), &[]);
    assert!(blobs(&copy) == layout.blobs());
}

#[test]
fn blobs_of_another_repository_are_mounted() {
    let Some(registry) = Registry::start(&Login::None) else { return };
    let (room, settings) = settings();
    let (layout, _) = image(&room.path("image"), 10, &[100_000, 200_000]);
    connect(&registry.reference("first"), &settings).push(&layout.folder, &quiet).unwrap();
    let second = connect(&registry.reference("second/part"), &settings).push(&layout.folder, &quiet).unwrap();
    assert_eq!((second.sent, second.uploaded, second.present, second.mounted), (0, 0, 0, 3));
    let there = connect(&registry.reference("second/part"), &settings).pull(Platform::Amd64, &quiet).unwrap();
    assert!(blobs(&there.layout) == layout.blobs());

    // A note of a repository that is gone, or of what is none, costs nothing but the upload.
    for entry in std::fs::read_dir(settings.cache.join("registries")).unwrap() {
        std::fs::write(entry.unwrap().path(), "never/was").unwrap();
    }
    let third = connect(&registry.reference("third"), &settings).push(&layout.folder, &quiet).unwrap();
    assert_eq!((third.uploaded, third.mounted), (3, 0));
    for entry in std::fs::read_dir(settings.cache.join("registries")).unwrap() {
        std::fs::write(entry.unwrap().path(), "../../v2/x?y=").unwrap();
    }
    let fourth = connect(&registry.reference("fourth"), &settings).push(&layout.folder, &quiet).unwrap();
    assert_eq!((fourth.uploaded, fourth.mounted), (3, 0));
}

/// A layout of an index with an image for each of two architectures, which share a layer.
fn index(folder: &Path) -> (Layout, Digest, [parts::Image; 2]) {
    let layout = Layout::new(folder);
    let images = ["amd64", "arm64"].map(|architecture| {
        layout.image(architecture, &[noise(20, 50_000), architecture.as_bytes().to_vec()])
    });
    let manifests: Vec<_> = images.iter().map(|image| image.descriptor.clone()).collect();
    let (digest, descriptor) =
        layout.document(INDEX, &json!({"schemaVersion": 2, "mediaType": INDEX, "manifests": manifests}));
    layout.finish(descriptor, "both");
    (layout, digest, images)
}

#[test]
fn an_index_is_pushed_with_all_its_images_and_pulled_for_a_platform() {
    let Some(registry) = Registry::start(&Login::None) else { return };
    let (room, settings) = settings();
    let (layout, digest, images) = index(&room.path("index"));
    let reference = registry.reference("both:1");
    let repository = connect(&reference, &settings);
    let proxy = Proxy::start(registry.port, |_| Fate::Pass);
    let through = connect(&parts::reference(proxy.port, "both:1"), &settings);
    let pushed = through.push(&layout.folder, &quiet).unwrap();
    assert_eq!((pushed.digest, pushed.uploaded), (digest, 5));
    // The tag never names anything but the whole, which comes last.
    let puts = proxy.seen().into_iter().filter(|seen| seen.is("PUT", "/manifests/")).map(|seen| seen.path);
    let by_digest = |image: &parts::Image| format!("/v2/both/manifests/{}", image.digest);
    let expected = [by_digest(&images[0]), by_digest(&images[1]), "/v2/both/manifests/1".to_owned()];
    assert_eq!(puts.collect::<Vec<_>>(), expected);
    assert!(proxy.seen().last().unwrap().is("PUT", "/manifests/1"));
    for (platform, image) in [(Platform::Amd64, &images[0]), (Platform::Arm64, &images[1])] {
        let pulled = repository.pull(platform, &quiet).unwrap();
        assert_eq!(pulled.digest, image.digest);
        assert_eq!(blobs(&pulled.layout).len(), 4, "the image's own manifest, configuration and layers");
    }

    let one = registry.reference("one");
    let (single, _) = image(&room.path("single"), 30, &[10]);
    connect(&one, &settings).push(&single.folder, &quiet).unwrap();
    let only_arm = Layout::new(&room.path("arm"));
    let arm = only_arm.image("arm64", &[vec![1]]);
    let (_, descriptor) =
        only_arm.document(INDEX, &json!({"schemaVersion": 2, "manifests": [arm.descriptor]}));
    only_arm.finish(descriptor, "arm");
    let repository = connect(&registry.reference("arm"), &settings);
    repository.push(&only_arm.folder, &quiet).unwrap();
    let error = repository.pull(Platform::Amd64, &quiet).unwrap_err();
    assert!(matches!(error, Error::NoPlatform { .. }), "{error:?}");
    assert!(error.to_string().ends_with("has no image for linux/amd64; it has \"linux/arm64\""), "{error}");

    let Some(raw) =
        tool("skopeo", &["inspect", "--raw", "--tls-verify=false", &format!("docker://{reference}")])
    else {
        return;
    };
    assert_eq!(Digest::of(raw.as_bytes()), digest);
    let copy = room.path("copy");
    skopeo_copy(&format!("docker://{reference}"), &format!("oci:{}:x", copy.display()), &["--all"]);
    assert!(blobs(&copy) == layout.blobs());
}

#[test]
fn docker_images_that_skopeo_pushed_are_pulled_with_their_digest() {
    let Some(registry) = Registry::start(&Login::None) else { return };
    let (room, settings) = settings();
    let (layout, _) = image(&room.path("image"), 40, &[20_000, 30_000]);
    let reference = registry.reference("converted:1");
    let (from, to) = (format!("oci:{}:fixture", layout.folder.display()), format!("docker://{reference}"));
    let Some(_) = skopeo_copy(&from, &to, &["--format", "v2s2"]) else { return };
    let raw = tool("skopeo", &["inspect", "--raw", "--tls-verify=false", &to]).unwrap();
    assert!(raw.contains("application/vnd.docker.distribution.manifest.v2+json"), "{raw}");
    let pulled = connect(&reference, &settings).pull(Platform::Amd64, &quiet).unwrap();
    assert_eq!(pulled.digest, Digest::of(raw.as_bytes()));
    // And on to another place, still the same.
    let pushed = connect(&registry.reference("again:2"), &settings).push(&pulled.layout, &quiet).unwrap();
    assert_eq!(pushed.digest, pulled.digest);
}

#[test]
fn podman_pulls_what_was_pushed() {
    let Some(registry) = Registry::start(&Login::None) else { return };
    let (room, settings) = settings();
    let (layout, image) = image(&room.path("image"), 50, &[20_000, 30_000]);
    let reference = registry.reference("team/podman:1");
    connect(&reference, &settings).push(&layout.folder, &quiet).unwrap();
    let (root, run) = (room.path("root").display().to_string(), room.path("run").display().to_string());
    let own = ["--root", &root, "--runroot", &run, "--storage-driver", "vfs", "--cgroup-manager", "cgroupfs"];
    let name = reference.to_string();
    let pull = [&own[..], &["pull", "--quiet", "--tls-verify=false", &name]].concat();
    let Some(id) = tool("podman", &pull) else { return };
    assert_eq!(id.trim(), image.config.hex());
    let inspect = [&own[..], &["image", "inspect", "--format", "{{.Digest}} {{.User}}", id.trim()]].concat();
    assert_eq!(tool("podman", &inspect).unwrap().trim(), format!("{} 65532:65532", image.digest));
}

#[test]
fn what_is_not_the_image_that_is_named_is_not_pushed() {
    let Some(registry) = Registry::start(&Login::None) else { return };
    let (room, settings) = settings();
    let (layout, image) = image(&room.path("image"), 60, &[1000, 2000]);
    let named = registry.reference(&format!("named@{}", image.digest));
    assert_eq!(connect(&named, &settings).push(&layout.folder, &quiet).unwrap().digest, image.digest);
    let other = registry.reference(&format!("named@{}", Digest::of(b"other")));
    let error = connect(&other, &settings).push(&layout.folder, &quiet).unwrap_err();
    assert!(matches!(&error, Error::OtherImage { found, .. } if *found == image.digest), "{error:?}");
    let error = connect(&other, &settings).pull(Platform::Amd64, &quiet).unwrap_err();
    assert!(matches!(error, Error::Refused { status: 404, .. }), "{error:?}");
    assert!(error.to_string().contains("MANIFEST_UNKNOWN"), "{error}");

    // A layer that is not what its name says is found here, and not by the registry.
    let blob = layout.folder.join("blobs/sha256").join(image.layers[1].hex());
    let mut bytes = std::fs::read(&blob).unwrap();
    bytes[100] ^= 1;
    std::fs::write(&blob, bytes).unwrap();
    // Nothing is known of other repositories that have it.
    let fresh = Settings { cache: room.path("fresh"), ..settings };
    let repository = connect(&registry.reference("damaged"), &fresh);
    let error = repository.push(&layout.folder, &quiet).unwrap_err();
    assert!(matches!(&error, Error::Layout(oci::Error::Damaged { path, .. }) if *path == blob), "{error:?}");
    assert!(repository.pull(Platform::Amd64, &quiet).is_err(), "no manifest without its blobs");
}

#[test]
fn without_the_network_nothing_is_asked() {
    let (_room, settings) = settings();
    let offline = Settings { offline: true, ..settings };
    let reference = parts::reference(parts::free_port(), "a");
    let Err(error) = Repository::connect(&reference, &offline, Default::default(), &quiet) else { panic!() };
    assert!(matches!(error, Error::Offline { .. }), "{error:?}");
}
