//! A kernel with its memory: the same addresses for every class, filled before each launch.

use ringseal::backend::CounterWidth;
use ringseal::cuda::{DeviceBuffer, MessageWorkspace, Stream};
use ringseal::{Error, Result};
use ringseal_kernels::gcm::{FORGED, Record, VERIFIED, nonce_j0};
use ringseal_kernels::message::Message;

use crate::classes::{AAD, Secrets};

/// What a kernel does, by the name that it has with the key length added.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Work {
    Ctr,
    SealRecords,
    OpenRecords,
    SealMessage,
    OpenMessage,
}

impl Work {
    pub(crate) const ALL: [Self; 5] =
        [Self::Ctr, Self::SealRecords, Self::OpenRecords, Self::SealMessage, Self::OpenMessage];

    /// Name of the kernel for a key of `bits`.
    pub(crate) fn kernel(self, bits: usize) -> String {
        match self {
            Self::Ctr => format!("aes{bits}_ctr_xor"),
            Self::SealRecords => format!("gcm_seal_records_{bits}"),
            Self::OpenRecords => format!("gcm_open_records_{bits}"),
            Self::SealMessage => format!("gcm_seal_message_{bits}"),
            Self::OpenMessage => format!("gcm_open_message_{bits}"),
        }
    }

    pub(crate) fn opens(self) -> bool {
        matches!(self, Self::OpenRecords | Self::OpenMessage)
    }

    fn on_records(self) -> bool {
        matches!(self, Self::SealRecords | Self::OpenRecords)
    }
}

/// Where what is opened has one bit changed.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Forgery {
    /// This byte of every tag.
    Tag(usize),
    /// The first byte of every record, or of the message.
    FirstText,
    /// The last byte of every record, or of the message.
    LastText,
}

/// What a launch reads: the text is sealed already if it is to be opened.
pub(crate) struct Input {
    text: DeviceBuffer,
    tags: DeviceBuffer,
}

/// Memory of a launch.
pub(crate) struct Subject {
    work: Work,
    records: usize,
    record_bytes: usize,
    input: DeviceBuffer,
    output: DeviceBuffer,
    aad: DeviceBuffer,
    tags: DeviceBuffer,
    verdicts: DeviceBuffer,
    descriptors: DeviceBuffer,
    workspace: MessageWorkspace,
}

impl Subject {
    /// For a text of `bytes` in so many records, or in one message.
    pub(crate) fn new(work: Work, (records, bytes): (usize, usize), stream: &Stream) -> Result<Self> {
        let device = stream.device();
        let records = if work.on_records() { records } else { 1 };
        let mut verdicts = DeviceBuffer::new(device, 4 * records)?;
        verdicts.fill(0, stream)?;
        let mut subject = Self {
            work,
            records,
            record_bytes: bytes / records,
            input: DeviceBuffer::new(device, bytes)?,
            output: DeviceBuffer::new(device, bytes)?,
            aad: DeviceBuffer::new(device, AAD)?,
            tags: DeviceBuffer::new(device, 16 * records)?,
            verdicts,
            descriptors: DeviceBuffer::new(device, size_of::<Record>())?,
            workspace: MessageWorkspace::new(stream)?,
        };
        let mut descriptors = Vec::with_capacity(records * size_of::<Record>());
        for index in 0..records {
            let offset = (index * subject.record_bytes) as u64;
            let record = Record {
                input: subject.input.pointer() + offset,
                output: subject.output.pointer() + offset,
                aad: subject.aad.pointer(),
                tag: subject.tags.pointer() + 16 * index as u64,
                verdict: subject.verdicts.pointer() + 4 * index as u64,
                length: subject.record_bytes as u32,
                aad_length: AAD as u32,
                j0: nonce_j0([index as u32, 0, 0]),
            };
            // SAFETY: a record is 64 bytes of integers, with no padding.
            descriptors.extend_from_slice(&unsafe {
                std::mem::transmute::<Record, [u8; size_of::<Record>()]>(record)
            });
        }
        subject.descriptors = DeviceBuffer::from_host(&descriptors, stream)?;
        Ok(subject)
    }

    /// What [`launch`](Self::launch) reads for these secrets.
    pub(crate) fn input(
        &self,
        secrets: &Secrets,
        forgery: Option<Forgery>,
        stream: &Stream,
    ) -> Result<Input> {
        let mut text = secrets.text.to_host(stream)?;
        let mut tags = vec![0; self.tags.len()];
        if self.work.opens() {
            let plain = Input {
                text: DeviceBuffer::from_host(&text, stream)?,
                tags: DeviceBuffer::from_host(&tags, stream)?,
            };
            self.fill(secrets, &plain, stream)?;
            let work = if self.work.on_records() { Work::SealRecords } else { Work::SealMessage };
            self.run(work, secrets, stream)?;
            text = self.output.to_host(stream)?;
            tags = self.tags.to_host(stream)?;
        }
        let texts = text.chunks_mut(self.record_bytes);
        match forgery {
            Some(Forgery::Tag(at)) => tags.chunks_mut(16).for_each(|tag| tag[at] ^= 1),
            Some(Forgery::FirstText) => texts.for_each(|text| text[0] ^= 1),
            Some(Forgery::LastText) => texts.for_each(|text| text[self.record_bytes - 1] ^= 1),
            None => {}
        }
        Ok(Input {
            text: DeviceBuffer::from_host(&text, stream)?,
            tags: DeviceBuffer::from_host(&tags, stream)?,
        })
    }

    /// Queues the copies of what a launch reads to where it reads it.
    pub(crate) fn fill(&self, secrets: &Secrets, input: &Input, stream: &Stream) -> Result<()> {
        let copies = [(&self.input, &input.text), (&self.tags, &input.tags), (&self.aad, &secrets.aad)];
        for (to, from) in copies {
            // SAFETY: the buffers have the same length; they live until the stream has been waited for.
            unsafe { stream.copy(to.pointer(), from.pointer(), to.len())? };
        }
        Ok(())
    }

    /// Queues the kernel, and nothing else.
    pub(crate) fn launch(&self, secrets: &Secrets, stream: &Stream) -> Result<()> {
        self.run(self.work, secrets, stream)
    }

    fn run(&self, work: Work, secrets: &Secrets, stream: &Stream) -> Result<()> {
        let Secrets { ctr, gcm, .. } = secrets;
        let (input, output, bytes) = (self.input.pointer(), self.output.pointer(), self.input.len() as u64);
        let message = Message {
            input,
            output,
            length: bytes,
            aad: self.aad.pointer(),
            aad_length: AAD as u64,
            tag: self.tags.pointer(),
            verdict: self.verdicts.pointer(),
            j0: nonce_j0([0; 3]),
        };
        let (descriptors, records) = (self.descriptors.pointer(), self.records as u32);
        // SAFETY: all memory belongs to this subject and to the secrets, which outlive the work; one stream.
        unsafe {
            match work {
                Work::Ctr => ctr.ctr_xor([0; 16], CounterWidth::Gcm32, input, output, bytes, stream),
                Work::SealRecords => gcm.seal_records(descriptors, records, stream),
                Work::OpenRecords => gcm.open_records(descriptors, records, stream),
                Work::SealMessage => gcm.seal_message(&message, &self.workspace, stream),
                Work::OpenMessage => gcm.open_message(&message, &self.workspace, stream),
            }
        }
    }

    /// Fails unless the last launch, of what was forged or not, gave the verdict that it must.
    pub(crate) fn check(&self, forged: bool, stream: &Stream) -> Result<()> {
        let right = if forged { FORGED } else { VERIFIED }.to_le_bytes();
        match !self.work.opens() || self.verdicts.to_host(stream)?.chunks(4).all(|verdict| verdict == right) {
            true => Ok(()),
            false => Err(Error::Cuda(format!("{:?}, forged: {forged}: another verdict", self.work))),
        }
    }
}
