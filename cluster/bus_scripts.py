"""What Redis runs for a publisher, each in one atomic step. `cluster.bus` tells the keys."""

PUBLISH = """
-- KEYS card, blocks, events, workers, staging
-- ARGV mode, worker, epoch, previous, sequence, card, stored, evicted, cached,
--      lease_ms, blocks_ttl_ms, stream_max, report
-- and for each cold tier KEYS blocks, staging    ARGV stored, evicted, cached
local mode, worker, epoch, previous, sequence = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local held = redis.call('HMGET', KEYS[1], 'epoch', 'sequence')
if held[1] and held[1] > epoch then return 'superseded' end
local function each(command, key, joined)
  local batch = {}
  for i = 1, #joined, 16 do
    batch[#batch + 1] = joined:sub(i, i + 15)
    if #batch == 1000 or i + 16 > #joined then
      redis.call(command, key, unpack(batch))
      batch = {}
    end
  end
end
if mode == 'delta' and (held[1] ~= epoch or held[2] ~= previous) then return 'lost' end
local function apply(key, staging, stored, evicted, cached)
  if mode ~= 'delta' then
    redis.call('DEL', key)
    if redis.call('EXISTS', staging) == 1 then redis.call('RENAME', staging, key) end
  end
  each('SREM', key, evicted)
  each('SADD', key, stored)
  redis.call('PEXPIRE', key, ARGV[11])
  return redis.call('SCARD', key) == tonumber(cached)
end
if not apply(KEYS[2], KEYS[5], ARGV[7], ARGV[8], ARGV[9]) then return 'lost' end
for k = 6, #KEYS, 2 do
  local a = 14 + (k - 6) / 2 * 3
  if not apply(KEYS[k], KEYS[k + 1], ARGV[a], ARGV[a + 1], ARGV[a + 2]) then return 'lost' end
end
if ARGV[6] ~= '' then redis.call('HSET', KEYS[1], 'card', ARGV[6]) end
redis.call('HSET', KEYS[1], 'epoch', epoch, 'sequence', sequence)
redis.call('PEXPIRE', KEYS[1], ARGV[10])
redis.call('SADD', KEYS[4], worker)
redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[12], '*', 'r', ARGV[13])
return 'ok'
"""

LEAVE = """
-- KEYS card, blocks, events, workers, blocks of cold tiers
-- ARGV worker, epoch, stream_max, report
if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[2] then return 'superseded' end
redis.call('DEL', KEYS[1], KEYS[2], KEYS[5], KEYS[6])
redis.call('SREM', KEYS[4], ARGV[1])
redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[3], '*', 'r', ARGV[4])
return 'ok'
"""
