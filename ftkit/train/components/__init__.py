"""Parts of training: batches, the optimizer, evaluations, stored references and teachers, the recorder, the export."""
