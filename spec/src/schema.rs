//! JSON Schemas of every format that Trainyard persists, for editors and for programs that read its output.

use schemars::{Schema, schema_for};

use crate::corpus::CorpusManifest;
use crate::event::{JobRecord, TrainerEvent};
use crate::image::ImageManifest;
use crate::job::JobManifest;
use crate::lock::Lock;
use crate::plan::{LaunchPlan, NodePlan};
use crate::protocol::NodeEvent;
use crate::trainer::TrainerConfig;
use crate::vendored::VendoredIndex;

/// Each format's name and schema, sorted by name.
pub fn all() -> Vec<(&'static str, Schema)> {
    vec![
        ("corpus-manifest", schema_for!(CorpusManifest)),
        ("image-manifest", schema_for!(ImageManifest)),
        ("job-manifest", schema_for!(JobManifest)),
        ("job-record", schema_for!(JobRecord)),
        ("launch-plan", schema_for!(LaunchPlan)),
        ("lock", schema_for!(Lock)),
        ("node-event", schema_for!(NodeEvent)),
        ("node-plan", schema_for!(NodePlan)),
        ("trainer-config", schema_for!(TrainerConfig)),
        ("trainer-event", schema_for!(TrainerEvent)),
        ("vendored-index", schema_for!(VendoredIndex)),
    ]
}
