//! The signatures inside the result of a job's part: what workers who sign take from each other.

use weighbridge_schemas::error::DocumentError;
use weighbridge_schemas::job::{Document, JobId, JobPlan, PartResult};
use weighbridge_schemas::limits;
use weighbridge_schemas::names::ModelName;
use weighbridge_schemas::signature::PART_TYPE;

use super::keys::{Trust, claimed};
use super::signer::Signers;
use crate::error::{Class, Result, StoreError};
use crate::layout;

/// Which part: of a plan, of a job.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Part<'a> {
    pub(crate) model: &'a ModelName,
    pub(crate) job: &'a JobId,
    pub(crate) plan: &'a JobPlan,
    pub(crate) number: u64,
}

impl Part<'_> {
    fn signed_bytes(&self, json: &[u8]) -> std::result::Result<Vec<u8>, DocumentError> {
        self.plan.signed_part(self.model, self.job, self.number, json)
    }

    /// `result` with the signatures of all keys.
    pub(crate) fn sign(
        &self,
        signers: &Signers,
        result: &PartResult,
    ) -> std::result::Result<PartResult, DocumentError> {
        let body = self.signed_bytes(&result.to_bytes())?;
        Ok(PartResult { signatures: signers.sign(PART_TYPE, &body), ..result.clone() })
    }

    /// Checks that one of `trust` has signed `result`, whose stored bytes are `json`.
    ///
    /// # Errors
    /// [`Class::Integrity`], with how that can be and the way out.
    pub(crate) fn check(&self, trust: &Trust, result: &PartResult, json: &[u8]) -> Result<()> {
        let key = layout::part(self.model, self.job, self.number);
        let body = self
            .signed_bytes(json)
            .map_err(|error| StoreError::new(Class::Integrity, &key, error.to_string()))?;
        // Each costs as much as an honest one.
        let signatures = result.signatures.get(..limits::SIGNATURES).unwrap_or(&result.signatures);
        if trust.signer_of(PART_TYPE, &body, signatures).is_some() {
            return Ok(());
        }
        let who = if signatures.is_empty() {
            "nobody".to_owned()
        } else {
            format!("not by them as it stands, but, as it says, by {}", claimed(signatures))
        };
        let why = format!(
            "no key that this worker signs with or trusts ({trust}) signed the result of this part; it is signed by \
             {who}. Keys were turned on or changed while the job was under way, or workers sign with other keys than \
             this one, or somebody else wrote it: nothing is made of it. `weighbridge republish {} --job {}` \
             publishes the checkpoint anew",
            self.model, self.job
        );
        Err(StoreError::new(Class::Integrity, key, why))
    }
}
