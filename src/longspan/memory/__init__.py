"""Latent pages, index-key pages and KDA slots behind one `Memory`."""
