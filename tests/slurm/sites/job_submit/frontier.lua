-- The page's scripts name a project, and take whole nodes; it says of nothing else that it is refused.
function refused(job)
    if job.account == nil then return "an account must be given" end
end
