//! What pip's and apt's configuration says.

use std::collections::BTreeMap;
use std::ffi::OsString;

use tempfile::TempDir;
use trainyard_builder::index::{FindLinks, IndexSettings, SignedBy, Trust, parse_list, parse_sources};

/// Settings from variables and files below a root; `{root}` in both stands for it.
fn resolve(variables: &[(&str, &str)], files: &[(&str, &str)]) -> (TempDir, Result<IndexSettings, String>) {
    let root = TempDir::new().unwrap();
    let inside = |text: &str| text.replace("{root}", &root.path().display().to_string());
    for (name, text) in files {
        let path = root.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, inside(text)).unwrap();
    }
    let environment: BTreeMap<OsString, OsString> =
        variables.iter().map(|(name, value)| (name.into(), inside(value).into())).collect();
    let settings = IndexSettings::resolve(&environment, root.path()).map_err(|error| error.to_string());
    (root, settings)
}

#[test]
fn pip_reads_files_and_variables_as_pip_does() {
    let global = ("etc/pip.conf", "[global]\nindex-url = https://global.test/simple\n");
    let user = ("home/.config/pip/pip.conf", "[global]\nindex_url = https://user.test/simple/\n");
    let command = (
        "home/.config/pip/pip.conf",
        "[global]\nindex-url = https://a.test\n[download]\nindex-url = https://b.test\n",
    );
    let home = ("HOME", "{root}/home");
    let own = ("own.conf", "[global]\nindex-url = https://own.test/\n");
    let own_variable = ("PIP_CONFIG_FILE", "{root}/own.conf");
    let variable = ("PIP_INDEX_URL", "https://variable.test/simple");
    type Case<'a> = (&'a [(&'a str, &'a str)], &'a [(&'a str, &'a str)], &'a [&'a str]);
    let site_command = ("etc/pip.conf", "[download]\nindex-url = https://site.test/\n");
    let cases: [Case<'_>; 10] = [
        // A command's section wins wherever it stands.
        (&[home], &[site_command, user], &["https://site.test/"]),
        // One's own file that is not there stands in for nothing.
        (&[home, ("PIP_CONFIG_FILE", "{root}/absent")], &[user], &["https://user.test/simple/"]),
        (&[], &[], &[]),
        (&[], &[global], &["https://global.test/simple/"]),
        (&[home], &[global, user], &["https://user.test/simple/"]),
        (&[home], &[global, command], &["https://b.test/"]),
        (&[home, own_variable], &[user, own], &["https://own.test/"]),
        (&[home, own_variable, variable], &[user, own], &["https://variable.test/simple/"]),
        (&[("PIP_CONFIG_FILE", "/dev/null")], &[global], &[]),
        (&[("PIP_INDEX_URL", "")], &[global], &["https://global.test/simple/"]),
    ];
    for (variables, files, expect) in cases {
        let (_root, settings) = resolve(variables, files);
        let indexes: Vec<String> = settings.unwrap().python.indexes.iter().map(ToString::to_string).collect();
        assert_eq!(indexes, expect, "{variables:?} {files:?}");
    }
}

#[test]
fn pip_lists_may_span_lines() {
    let conf = "[global]\nextra-index-url =\n    https://one.test/simple\n    https://me:secret@two.test/simple\nno-index = true\n[install]\nfind-links = /wheels https://links.test/page.html\n";
    let (_root, settings) = resolve(&[], &[("etc/pip.conf", conf)]);
    let python = settings.unwrap().python;
    let extra: Vec<String> = python.extra.iter().map(ToString::to_string).collect();
    assert_eq!(extra, ["https://one.test/simple/", "https://two.test/simple/"]);
    assert!(python.no_index);
    assert_eq!(python.find_links[0], FindLinks::Folder("/wheels".into()));
    assert!(
        matches!(&python.find_links[1], FindLinks::Page(page) if page.to_string() == "https://links.test/page.html")
    );
}

#[test]
fn a_file_of_ones_own_stands_in_for_the_users() {
    let user = ("home/.pip/pip.conf", "[global]\nextra-index-url = https://user.test/\n");
    let own = ("own.conf", "[global]\nno-index = yes\n");
    let (_root, settings) =
        resolve(&[("HOME", "{root}/home"), ("PIP_CONFIG_FILE", "{root}/own.conf")], &[user, own]);
    let python = settings.unwrap().python;
    assert!(python.no_index && python.extra.is_empty(), "{python:?}");
}

#[test]
fn configuration_that_makes_no_sense_is_named() {
    let (_root, settings) = resolve(&[("PIP_INDEX_URL", "not an address")], &[]);
    assert!(settings.unwrap_err().contains("PIP_INDEX_URL"));
    let (_root, settings) = resolve(&[], &[("etc/pip.conf", "[global]\nindex-url = nowhere\n")]);
    assert!(settings.unwrap_err().contains("etc/pip.conf"));
}

#[test]
fn apt_sources_in_both_formats() {
    let list = "# deb http://off.test/debian x main\n\
        deb [arch=amd64 signed-by=/k.gpg] http://a.test/debian bookworm main contrib # note\n\
        deb-src http://a.test/debian bookworm main\n\
        deb cdrom:[Debian]/ bookworm main\n\
        deb http://flat.test/ ./\n";
    let sources = "Types: deb deb-src\n# comment inside\nURIs: http://b.test/debian/ http://c.test/debian\nSuites: s1 s2\nComponents: main\nArchitectures: amd64 arm64\n\n\
        Enabled: No\nTypes: deb\nURIs: http://off.test/\nSuites: s\nComponents: main\n\n\
        Types: deb-src\nURIs: http://src.test/\nSuites: s\nComponents: main\n";
    let shown = |sources: Vec<trainyard_builder::index::AptSource>| -> Vec<String> {
        let show = |one: &trainyard_builder::index::AptSource| {
            let words = [&one.suites, &one.components, &one.architectures].map(|words| words.join(","));
            format!("{} {}", one.root, words.join(" ")).trim_end().to_owned()
        };
        sources.iter().map(show).collect()
    };
    assert_eq!(shown(parse_list(list)), ["http://a.test/debian/ bookworm main,contrib amd64"]);
    assert_eq!(
        shown(parse_sources(sources)),
        ["http://b.test/debian/ s1,s2 main amd64,arm64", "http://c.test/debian/ s1,s2 main amd64,arm64"]
    );
    let (_root, settings) = resolve(
        &[],
        &[
            ("etc/apt/sources.list", list),
            ("etc/apt/sources.list.d/x.sources", sources),
            ("etc/apt/sources.list.d/y.save", list),
        ],
    );
    assert_eq!(settings.unwrap().debian.len(), 3);
}

#[test]
fn apt_says_whose_signatures_count() {
    let keys = |trust: &Trust| match trust {
        Trust::Unsigned => "unsigned".to_owned(),
        Trust::Keys(SignedBy { files, blocks, only }) => format!("{files:?} {blocks:?} {only:?}"),
    };
    let list = |options: &str| keys(&parse_list(&format!("deb {options} http://a.test/ x main"))[0].trust);
    assert_eq!(list("[signed-by=/a.gpg,/b.asc arch=amd64]"), r#"["/a.gpg", "/b.asc"] [] []"#);
    assert_eq!(list("[signed-by=abcd!]"), r#"[] [] ["ABCD"]"#);
    assert_eq!(list("[trusted=yes signed-by=/a.gpg]"), "unsigned");
    assert_eq!(list("[trusted=no]"), "[] [] []");
    let sources = |fields: &str| {
        let text = format!("Types: deb\nURIs: http://b.test/\nSuites: s\nComponents: main\n{fields}\n");
        parse_sources(&text).remove(0)
    };
    let block =
        "Signed-By:\n -----BEGIN PGP PUBLIC KEY BLOCK-----\n .\n AQID\n -----END PGP PUBLIC KEY BLOCK-----";
    let expect =
        r#"[] ["\n-----BEGIN PGP PUBLIC KEY BLOCK-----\n\nAQID\n-----END PGP PUBLIC KEY BLOCK-----"] []"#;
    assert_eq!(keys(&sources(block).trust), expect);
    assert!(sources("Trusted: yes").trust == Trust::Unsigned && sources("").check_valid_until);
    assert!(!sources("Check-Valid-Until: no").check_valid_until);

    // Where a source names none, those that apt trusts for every archive count.
    let (root, settings) = resolve(
        &[],
        &[
            (
                "etc/apt/sources.list",
                "deb http://a.test/ x main\ndeb [signed-by=/usr/k.gpg] http://b.test/ x main\n",
            ),
            ("etc/apt/trusted.gpg.d/b.asc", "key"),
            ("etc/apt/trusted.gpg.d/a.gpg", "key"),
            ("etc/apt/trusted.gpg.d/a.old", "key"),
            ("etc/apt/trusted.gpg", ""),
        ],
    );
    let found: Vec<_> = settings.unwrap().debian.iter().map(|source| keys(&source.trust)).collect();
    let path = |name: &str| root.path().join(name);
    let machine = [path("etc/apt/trusted.gpg.d/a.gpg"), path("etc/apt/trusted.gpg.d/b.asc")];
    assert_eq!(found, [format!("{machine:?} [] []"), format!("{:?} [] []", [path("usr/k.gpg")])]);
}
