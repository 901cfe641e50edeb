//! From a request to the engine and back, without HTTP: what `nuthatch batch` shares with the server.
//!
//! ```text
//!   wire::Request --Endpoint::submissions--> engine --Output--> Job --> Body, or a Chunk for each token
//! ```

mod ask;
mod body;
mod echo;
mod guide;
mod job;
mod responses;
mod tool_text;

pub use ask::{Endpoint, Origin, refusal};
pub use body::{Body, Event, Heading};
pub use job::{Job, Piece};
pub use tool_text::ToolFormat;

pub(crate) use tool_text::unique;
